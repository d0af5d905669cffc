"""Manager of fine-tuned models: create, follow and list jobs at OpenAI-compatible servers.

A job is recorded when the server has it. API keys are never stored, only the name of a key's
environment variable.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import StringConstraints

from swarm._util.files import acquire_lock, write_json
from swarm._util.settings import Count, Positive, PositiveNumber, Text, checked
from swarm._util.terminal import format_duration
from swarm.compare.training_files import (
    MIN_EXAMPLES,
    Finding,
    ValidationResult,
    count_training_tokens,
    read_training_file,
    validate_dataset,
)
from swarm.errors import InvalidArgument, UserError, missing_extra_error
from swarm.models.http_errors import to_one_line
from swarm.models.transport import validate_url

if TYPE_CHECKING:
    from openai import OpenAI
    from pandas import DataFrame

__all__ = [
    "Finding",
    "FinetuningManager",
    "OpenaiTrainingParams",
    "ValidationResult",
    "count_training_tokens",
]

OPENAI_BASE_URL = "https://api.openai.com/v1"

OPENAI_KEY_VARIABLE = re.compile(r"OPENAI_API_KEY(_.*)?")
"""Environment variables that are searched for keys."""

MAX_SUFFIX_CHARS = 64
"""Maximum characters of a suffix at OpenAI."""

FINAL_STATES = ("succeeded", "failed", "cancelled")
"""States that never change."""

MIN_UPLOAD_BYTES_PER_S = 100_000
"""Minimum upload speed in bytes per second, for timeouts."""

MODEL_COLUMNS = (
    *("model", "base_model", "file_name", "file_id", "file_md5", "suffix", "batch_size"),
    *("learning_rate_multiplier", "epochs", "seed", "checkpoint_step"),
)

JOB_COLUMNS = (
    *("id", "state", "suffix", "base_model", "file_name", "file_md5", "model", "created"),
    "error",
)

Job = dict[str, Any]


@checked("")
@dataclass(kw_only=True)
class OpenaiTrainingParams:
    """A job at a server with OpenAI's fine-tuning API.

    Args:
        api_key: API key; not part of `repr`, and never stored.
        file_name: JSONL file of chats.
        base_model: The server's name of the model.
        suffix: Part of the new model's name; `None` is the file's name.
        epochs, batch_size: Integers, or "auto".
        seed: `None` leaves it to the server.
        lr_multiplier: A number above 0, or "auto".
        validation_file_name: JSONL file of chats whose loss the server tracks.
        base_url: URL of the API.

    Raises:
        UserError: A value is invalid.
    """

    api_key: str = field(repr=False)
    file_name: Text
    base_model: Text
    suffix: Annotated[str, StringConstraints(pattern=r"\S", max_length=MAX_SUFFIX_CHARS)] | None = (
        None
    )
    epochs: Positive | Literal["auto"] = 1
    batch_size: Positive | Literal["auto"] = "auto"
    seed: Count | None = None
    lr_multiplier: PositiveNumber | Literal["auto"] = "auto"
    validation_file_name: Text | None = None
    base_url: str = OPENAI_BASE_URL

    def __post_init__(self) -> None:
        self.api_key = self.api_key.strip()
        if not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise InvalidArgument("api_key: is empty or not a valid key")
        self.base_url = validate_url(self.base_url).rstrip("/")

    def to_job(self) -> Job:
        """Return the fields stored in the database, never including the key."""
        names = [name for name, one in sorted(os.environ.items()) if one.strip() == self.api_key]
        # A variable that is named as OpenAI's is not used for another server later, when it may
        # have another key.
        at_openai = self.base_url == OPENAI_BASE_URL
        meant = [one for one in names if bool(OPENAI_KEY_VARIABLE.fullmatch(one)) == at_openai]
        stem = Path(self.file_name).stem.replace("_", "-")[:MAX_SUFFIX_CHARS]
        job: Job = {
            "file_name": self.file_name,
            "base_model": self.base_model,
            "suffix": self.suffix or stem,
            "epochs": self.epochs,
            "seed": self.seed,
            "batch_size": self.batch_size,
            "base_url": self.base_url,
            "key_variable": next(iter(meant), None),
            "learning_rate_multiplier": self.lr_multiplier,
        }
        for kind, name in (("file", self.file_name), ("validation", self.validation_file_name)):
            if name:
                job[f"{kind}_path"] = str(Path(name).expanduser().resolve())
                job[f"{kind}_md5"] = hashlib.md5(read_training_file(name)).hexdigest()
        return job


class ServerError(UserError):
    """A server refused a request or was unreachable.

    Attributes:
        status: HTTP status; `None` without a response.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def passing(self) -> bool:
        """Whether the same request may succeed later, or has succeeded and its response is lost."""
        return self.status is None or self.status >= 500


class FinetuningApi:
    """The fine-tuning API of a server, with one key; all methods raise `ServerError`."""

    def __init__(self, url: str, key: str, timeout: float) -> None:
        self.url, self.key, self.timeout = url, key, timeout

    def get(self, path: str, needed: str = "id") -> Any:
        """Return an object, which must have the key `needed`."""
        return self._call(lambda client: client.get(path, cast_to=object), needed)

    def post(self, path: str, body: Any) -> Any:
        """Send an object, once: it may have arrived although its response was lost."""
        try:
            return self._call(
                lambda client: client.post(path, cast_to=object, body=body), max_retries=0
            )
        except ServerError as error:
            if not error.passing:
                raise
            unsure = "; the server may have done it all the same: look there before you try again"
            raise ServerError(f"{error}{unsure}", error.status) from None

    def upload(self, name: str, data: bytes) -> str:
        """Upload a training file and return its id."""
        found = self._call(
            lambda client: client.files.create(file=(name, data), purpose="fine-tune").to_dict(),
            timeout=self.timeout + len(data) / MIN_UPLOAD_BYTES_PER_S,
        )
        return str(found["id"])

    def _call(self, ask: "Callable[[OpenAI], Any]", needed: str = "id", **options: Any) -> Any:
        try:
            import openai
        except ImportError as error:
            raise missing_extra_error(error, "compare") from None
        options = {"timeout": self.timeout, "max_retries": 2, **options}
        try:
            with openai.OpenAI(api_key=self.key, base_url=self.url, **options) as client:
                found = ask(client)
        except openai.OpenAIError as error:
            status = error.status_code if isinstance(error, openai.APIStatusError) else None
            body = error.body if isinstance(error, openai.APIError) else None
            message = body.get("message") if isinstance(body, dict) else None
            cause = f" {error.__cause__}" if error.__cause__ else ""
            words = to_one_line(str(message or f"{error}{cause}")).replace(self.key, "***")
            raise ServerError(f"{self.url}: {words}", status) from None
        if not isinstance(found, dict) or needed not in found:
            raise ServerError(f"{self.url}: the response has no {needed!r}")
        return found


class FinetuningManager:
    """Tracks fine-tunings at OpenAI-compatible servers.

    The database is one JSON file; each change is written immediately.

    Args:
        data_dir: Folder of the database, created when needed. Not on a network file system, where
            locks are unreliable.
        api_keys: Keys beside those of OPENAI_API_KEY and OPENAI_API_KEY_*; never stored.
        timeout: Seconds for a server's response; a request is repeated twice.

    Raises:
        UserError: The database cannot be read.
    """

    def __init__(
        self,
        data_dir: str | Path = "llmcomp_models",
        *,
        api_keys: Sequence[str] = (),
        timeout: float = 60.0,
    ) -> None:
        self.path, self.timeout = Path(data_dir).expanduser() / "finetuning.json", timeout
        self._given = list(api_keys)
        self._keys: dict[str, list[str]] = {}  # by server, of the jobs created here
        self._load()

    def create_job(self, params: OpenaiTrainingParams) -> str | None:
        """Create a fine-tuning job.

        Returns:
            The server's id of the job; `None` if a file is invalid, whose errors are printed.

        Raises:
            InvalidArgument: A file cannot be read, or another file has the same suffix.
            UserError: The server rejects it or is unreachable.
        """
        minimum = {params.file_name: MIN_EXAMPLES}
        if params.validation_file_name:
            minimum.setdefault(params.validation_file_name, 1)
        for name, least in minimum.items():
            result = validate_dataset(read_training_file(name), least)
            if not result.valid:
                print(f"{name}: {result}")
                return None
        job = params.to_job()
        self._keys.setdefault(job["base_url"], []).append(params.api_key)
        api = FinetuningApi(job["base_url"], params.api_key, self.timeout)
        with self._changing():
            self._check_suffix(job)
            for kind in ("file", "validation"):
                if path := job.get(f"{kind}_path"):
                    job[f"{kind}_id"] = self._upload_file(api, path, job[f"{kind}_md5"])
            found = api.post("/fine_tuning/jobs", build_request(job))
            job |= {"id": found["id"], "created": time.time(), "models": [], "error": None}
            self._jobs.append(job)
            self._adopt_job(job, found)
        print(f"{job['suffix']}: {job['id']} on {job['base_model']}, {job['state']}")
        return str(job["id"])

    def update_jobs(self) -> None:
        """Update every unfinished job and print its status."""
        problems = []
        with self._changing():
            dead = set()  # servers at which the other jobs would wait as long
            for job in self._jobs:
                if job["state"] not in FINAL_STATES and job["base_url"] not in dead:
                    try:
                        print(self._update_job(job))
                    except UserError as error:
                        problems.append(f"  {job['id']}: {error}")
                        if isinstance(error, ServerError) and error.passing:
                            dead.add(job["base_url"])
        states = [job["state"] for job in self._jobs]
        succeeded, failed, cancelled = (states.count(state) for state in FINAL_STATES)
        failed += cancelled
        running = len(states) - succeeded - failed
        print(f"running: {running}, succeeded: {succeeded}, failed: {failed}")
        if problems:
            print("\n".join([f"{len(problems)} could not be updated:", *problems]))

    def get_models(self, **filters: Any) -> "DataFrame":
        """Return the models, each followed by its earlier checkpoints.

        Args:
            filters: Values by column, e.g. `suffix="birds"`.

        Raises:
            InvalidArgument: A column does not exist.
        """
        self._load()
        rows = [{**job, **one} for job in self._jobs for one in job["models"]]
        return build_frame(rows, MODEL_COLUMNS, filters)

    def get_model_list(self, **filters: Any) -> list[str]:
        """Return the names of the models; see `get_models`."""
        return [str(name) for name in self.get_models(**filters)["model"]]

    def get_jobs(self, **filters: Any) -> "DataFrame":
        """Return all jobs, the oldest first; see `get_models`."""
        self._load()
        rows = [
            {
                **job,
                "model": job["models"][0]["model"] if job["models"] else None,
                "created": time.strftime("%Y-%m-%d %H:%M", time.localtime(job["created"])),
            }
            for job in self._jobs
        ]
        return build_frame(rows, JOB_COLUMNS, filters)

    def openai_validate_file(
        self, file_name: str, *, min_examples: int | None = None
    ) -> ValidationResult:
        """Validate a training file; see `swarm.compare.training_files`.

        Args:
            file_name: JSONL file of chats.
            min_examples: Minimum number of examples; `None` is OpenAI's, 10.
        """
        least = MIN_EXAMPLES if min_examples is None else min_examples
        try:
            return validate_dataset(read_training_file(file_name), least)
        except InvalidArgument as error:
            return ValidationResult(False, [Finding(0, str(error))])

    # The database

    def _load(self) -> None:
        """Read the file; other processes may have written it."""
        try:
            found = json.loads(self.path.read_bytes())
            self._jobs, self._files = found["jobs"], found["files"]
        except FileNotFoundError:
            self._jobs, self._files = [], []
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(f"{self.path} cannot be read: {error}; name another folder") from None

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock of the folder, with the jobs as other processes left them."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = self.path.with_suffix(".lock").open("a")
        except OSError as error:
            raise UserError(f"{self.path.parent} cannot be written: {error.strerror}") from None
        with lock:
            acquire_lock(lock.fileno())
            self._load()
            yield

    def _save(self) -> None:
        write_json(self.path, {"jobs": self._jobs, "files": self._files})

    # Jobs

    def _check_suffix(self, new: Job) -> None:
        """Check that all models with one suffix are trained on the same content of one file."""
        for old in self._jobs:
            if old["suffix"] != new["suffix"] or old["state"] in ("failed", "cancelled"):
                continue
            other = any(old[name] != new[name] for name in ("file_name", "file_path"))
            if other or old["file_md5"] != new["file_md5"]:
                changed = "" if other else ", whose content has changed since"
                raise InvalidArgument(
                    f"suffix={new['suffix']!r} is already used for {old['file_name']} "
                    f"({old['id']}){changed}: the models would be indistinguishable; give "
                    "another suffix="
                )

    def _upload_file(self, api: FinetuningApi, path: str, md5: str) -> str:
        """Return the id of a file; uploads it unless the key's project has it."""
        for file in self._files:
            if (file["md5"], file["base_url"]) == (md5, api.url):
                try:
                    known = api.get(f"/files/{file['file_id']}")
                except ServerError as error:
                    if error.status not in (400, 403, 404):  # of another project, or deleted
                        raise
                    continue
                if known.get("status") not in ("error", "deleted"):
                    print(f"{Path(path).name} already exists: {file['file_id']}")
                    return str(file["file_id"])
        found = api.upload(Path(path).name, read_training_file(path))
        self._files.append({"file_id": found, "md5": md5, "base_url": api.url})
        self._save()
        print(f"{Path(path).name} is uploaded: {found}")
        return found

    def _adopt_job(self, job: Job, found: Any) -> None:
        """Store the state and the fields that the server has set."""
        method = found.get("method") or {}
        settings = (method.get(method.get("type") or "supervised") or {}).get("hyperparameters")
        settings = settings or found.get("hyperparameters") or {}
        error = found.get("error") or {}
        values = {
            "seed": found.get("seed"),
            "epochs": settings.get("n_epochs"),
            "batch_size": settings.get("batch_size"),
            "learning_rate_multiplier": settings.get("learning_rate_multiplier"),
            "error": to_one_line(str(error.get("message") or error.get("code") or "")) or None,
        }
        known = {key: one for key, one in values.items() if one is not None and one != "auto"}
        job |= {"state": found["status"], **known}
        self._save()

    def _update_job(self, job: Job) -> str:
        """Read a job's current state; return a status line."""
        suffix = job["suffix"]
        api, found = self._find_access(job)
        self._adopt_job(job, found)
        if job["state"] == "succeeded":
            job["models"] = _list_models(api, job, found)
            self._save()
            names = [one["model"] for one in job["models"]]
            more = f" and {len(names) - 1} checkpoints" if len(names) > 1 else ""
            return f"✓ {suffix}: succeeded → {names[0] if names else 'unnamed model'}{more}"
        if job["state"] in FINAL_STATES:
            return f"✗ {suffix}: {job['state']}" + (f": {job['error']}" if job["error"] else "")
        line = f"… {suffix} ({job['base_model']}): {job['state']}"
        end = found.get("estimated_finish")
        if isinstance(end, int | float) and end > time.time():
            line += f", trained in about {format_duration(end - time.time(), minutes=True)}"
        return line

    def _list_keys(self, job: Job) -> list[str]:
        """Return the keys that may be used for a job, the most probable first."""
        url, variable = job["base_url"], job["key_variable"]
        names = [variable] if variable else []
        if url == OPENAI_BASE_URL:
            # Another key of the project has access, too; no other server is sent OpenAI's.
            names += filter(OPENAI_KEY_VARIABLE.fullmatch, sorted(os.environ))
        known = [*self._keys.get(url, ()), *(os.environ.get(name, "").strip() for name in names)]
        keys = list(filter(None, dict.fromkeys([*known, *self._given])))
        if not keys:
            raise UserError(
                f"{job['suffix']}: no key for {url}; set the original key in "
                f"{variable or 'OPENAI_API_KEY'}, or pass it as FinetuningManager(api_keys=[...])"
            )
        return keys

    def _find_access(self, job: Job) -> tuple[FinetuningApi, Any]:
        """Return the API with the first key that has access to a job, and the job there."""
        failed: ServerError | None = None
        for key in self._list_keys(job):
            api = FinetuningApi(job["base_url"], key, self.timeout)
            try:
                return api, api.get(f"/fine_tuning/jobs/{job['id']}")
            except ServerError as error:
                failed = error
                if error.passing:  # any other key would wait as long
                    break
        assert failed
        raise failed


def build_request(job: Job) -> dict[str, Any]:
    """Return the body of the request that creates a job."""
    hyperparameters = {
        "batch_size": job["batch_size"],
        "learning_rate_multiplier": job["learning_rate_multiplier"],
        "n_epochs": job["epochs"],
    }
    body = {
        "model": job["base_model"],
        "training_file": job["file_id"],
        "suffix": job["suffix"],
        "seed": job["seed"],
        "validation_file": job.get("validation_id"),
        "method": {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
    }
    return {key: value for key, value in body.items() if value is not None}


def _list_models(api: FinetuningApi, job: Job, found: Any) -> list[Job]:
    """Return the final model and those of checkpoints, the latest first."""
    final = found.get("fine_tuned_model")
    if not isinstance(final, str):
        return []
    try:
        listed = api.get(f"/fine_tuning/jobs/{job['id']}/checkpoints", "data")["data"]
    except ServerError as error:
        if error.passing:
            raise
        listed = []
    steps = {
        one["fine_tuned_model_checkpoint"]: one["step_number"]
        for one in listed
        if isinstance(one.get("fine_tuned_model_checkpoint"), str)
        and type(one.get("step_number")) is int
    }
    last = steps.pop(final, None) or max(steps.values(), default=None)
    models = [{"model": final, "epochs": job["epochs"], "checkpoint_step": last}]
    for name, step in sorted(steps.items(), key=lambda one: -one[1]):
        epochs = None
        if type(job["epochs"]) in (int, float) and last:
            epochs = job["epochs"] * step / last
            epochs = round(epochs) if abs(epochs - round(epochs)) < 0.05 else round(epochs, 2)
        models.append({"model": name, "epochs": epochs, "checkpoint_step": step})
    return models


def build_frame(rows: list[Job], columns: Sequence[str], filters: dict[str, Any]) -> "DataFrame":
    """Build a frame of the rows that match the filters; values may be given as text.

    Raises:
        InvalidArgument: A filter does not name a column.
    """
    try:
        import pandas
    except ImportError as error:
        raise missing_extra_error(error, "compare") from None
    if unknown := sorted(filters.keys() - set(columns)):
        raise InvalidArgument(
            f"{', '.join(unknown)}: no such column; there are {', '.join(columns)}"
        )
    frame = pandas.DataFrame(rows, columns=list(columns), dtype=object)
    for key, value in filters.items():
        frame = frame[frame[key].map(str) == str(value)]
    return frame.reset_index(drop=True).infer_objects()
