"""Manager of fine-tuned models: create, follow and list jobs at OpenAI-compatible servers.

Each step of a job is recorded before it is taken, so that any of them may fail: no job is created
twice, and none is lost. API keys are never stored, only the name of a key's environment variable.
"""

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

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

JOB_ID_TAG = "model_swarms"
"""Metadata key at the server with the job's id in this database."""

SETTLE_S = 60.0
"""Seconds after which a request without a response has either created a job or never will."""

MAX_CLOCK_SKEW_S = 120.0
"""Maximum seconds that a server's clock may be behind."""

MIN_UPLOAD_BYTES_PER_S = 100_000
"""Minimum upload speed in bytes per second, for timeouts."""

MODEL_COLUMNS = (
    *("model", "base_model", "file_name", "file_id", "file_md5", "suffix", "batch_size"),
    *("learning_rate_multiplier", "epochs", "seed", "checkpoint_step"),
)

JOB_COLUMNS = (
    *("id", "state", "suffix", "base_model", "file_name", "file_md5", "job", "model"),
    *("created", "error"),
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


class ApiKey(NamedTuple):
    """An API key, and the environment variable it is from, if any."""

    secret: str
    variable: str | None = None

    def __repr__(self) -> str:
        return f"ApiKey({self.variable or 'given'})"


class ServerError(UserError):
    """A server refused a request or was unreachable.

    Attributes:
        status: HTTP status; `None` without a response.
        reason: OpenAI's code of the error.
    """

    def __init__(self, message: str, status: int | None = None, reason: str | None = None) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason

    @property
    def passing(self) -> bool:
        """Whether the same request may succeed later, or has succeeded and its response is lost."""
        return self.status is None or self.status >= 500


class FinetuningApi:
    """The fine-tuning API of a job's server, with one key; all methods raise `ServerError`."""

    def __init__(self, job: Job, key: ApiKey, timeout: float) -> None:
        self.url, self.key, self.timeout = job["base_url"], key, timeout

    def get(self, path: str, needed: str = "id", **query: Any) -> Any:
        """Return an object, which must have the key `needed`."""
        options: Any = {"params": query}
        return self._call(lambda client: client.get(path, cast_to=object, options=options), needed)

    def post(self, path: str, body: Any = None) -> Any:
        """Send an object, once: it may have arrived although its response was lost."""
        return self._call(
            lambda client: client.post(path, cast_to=object, body=body), max_retries=0
        )

    def upload(self, name: str, data: bytes) -> str:
        """Upload a training file and return its id."""
        found = self._call(
            lambda client: client.files.create(file=(name, data), purpose="fine-tune").to_dict(),
            timeout=self.timeout + len(data) / MIN_UPLOAD_BYTES_PER_S,
        )
        return str(found["id"])

    def list_jobs(self, since: float) -> list[Any]:
        """Return the jobs created since a time, the latest first."""
        found: list[Any] = []
        query = {"limit": "100"}
        while True:
            page = self.get("/fine_tuning/jobs", "data", **query)
            found += page["data"]
            times = [one.get("created_at") or since for one in found]
            if not page.get("has_more") or not found or times[-1] < since:
                return [one for one, at in zip(found, times, strict=True) if at >= since]
            query["after"] = found[-1]["id"]

    def _call(self, ask: "Callable[[OpenAI], Any]", needed: str = "id", **options: Any) -> Any:
        try:
            import openai
        except ImportError as error:
            raise missing_extra_error(error, "compare") from None
        options = {"timeout": self.timeout, "max_retries": 2, **options}
        try:
            with openai.OpenAI(api_key=self.key.secret, base_url=self.url, **options) as client:
                found = ask(client)
        except openai.OpenAIError as error:
            status = error.status_code if isinstance(error, openai.APIStatusError) else None
            body = error.body if isinstance(error, openai.APIError) else None
            message = body.get("message") if isinstance(body, dict) else None
            cause = f" {error.__cause__}" if error.__cause__ else ""
            words = to_one_line(str(message or f"{error}{cause}")).replace(self.key.secret, "***")
            hint = f" (key: {self.key.variable or 'the given key'})" * (status in (401, 403))
            reason = error.code if isinstance(error, openai.APIError) else None
            raise ServerError(f"{self.url}: {words}{hint}", status, reason) from None
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
        self._given = [ApiKey(secret) for secret in api_keys]
        self._keys: dict[str, ApiKey] = {}  # keys by the id of their job
        self._load()

    def create_job(self, params: OpenaiTrainingParams) -> str | None:
        """Create a fine-tuning job, or resume an interrupted one with the same parameters.

        Returns:
            The id of the job; `None` if a file is invalid, whose errors are printed.

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
        with self._changing():
            job = self._prepare_job(params)
            self._submit_job(job)
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

    def _update(self, job: Job, /, **values: Any) -> None:
        """Change a job, and write the file."""
        job.update(values)
        write_json(self.path, {"jobs": self._jobs, "files": self._files})

    # The steps of a job

    def _prepare_job(self, params: OpenaiTrainingParams) -> Job:
        """Store a job before any request, or return an interrupted one with the same parameters."""
        new = params.to_job()
        key = ApiKey(params.api_key, new["key_variable"])
        for old in self._jobs:
            same = old["state"] == "creating" and all(old.get(name) == new[name] for name in new)
            if same:
                self._keys[old["id"]] = key
                print(f"{old['suffix']}: resuming {old['id']}, which was interrupted")
                return old
            # All models with one suffix are trained on the same content of one file.
            if old["suffix"] == new["suffix"] and old["state"] not in ("failed", "cancelled"):
                names = ("file_name", "file_path")
                other = all(old[name] != new[name] for name in names)
                if other or old["file_md5"] != new["file_md5"]:
                    changed = "" if other else ", whose content has changed since"
                    raise InvalidArgument(
                        f"suffix={new['suffix']!r} is already used for {old['file_name']} "
                        f"({old['id']}){changed}: the models would be indistinguishable; give "
                        "another suffix="
                    )
        job: Job = {**new, "id": f"job-{secrets.token_hex(6)}", "created": time.time()}
        self._keys[job["id"]] = key
        self._jobs.append(job)
        self._update(job, state="creating", job=None, sent=0.0, models=[], error=None)
        return job

    def _submit_job(self, job: Job) -> None:
        """Take the remaining steps until the server has the job.

        Raises:
            ServerError: The server is unreachable or rejects it.
            UserError: No key is known, or a file has changed.
        """
        api = FinetuningApi(job, self._list_keys(job)[0], self.timeout)
        try:
            if job["sent"] and self._find_lost_job(api, job):
                return
            if (delay := job["sent"] + SETTLE_S - time.time()) > 0:
                raise UserError(
                    f"{job['suffix']}: the server may still create the job whose response was "
                    f"lost; call update_jobs again in {delay:.0f} s"
                )
            for kind, name in (("file", "file_id"), ("validation", "validation_file_id")):
                if job.get(f"{kind}_path") and not job.get(name):
                    found = self._upload_file(api, job, job[f"{kind}_path"], job[f"{kind}_md5"])
                    self._update(job, **{name: found})
            self._create_at_server(api, job)
        except ServerError as error:
            limited = error.status == 429 and error.reason != "insufficient_quota"
            # If a response was lost, the job may exist, whatever later responses are.
            keep = limited or error.passing or job["sent"]
            self._update(job, error=str(error), **({} if keep else {"state": "failed"}))
            if not limited:
                raise
            print(f"{job['suffix']}: {error}. It is stored as {job['id']}; update_jobs sends it")

    def _list_keys(self, job: Job, others: Sequence[ApiKey] = ()) -> list[ApiKey]:
        """Return the keys that may be used for a job, the most probable first."""
        variable = job["key_variable"]
        own = [self._keys[job["id"]]] if job["id"] in self._keys else []
        if variable and (present := os.environ.get(variable, "").strip()):
            own.append(ApiKey(present, variable))
        keys: dict[str, ApiKey] = {}
        for key in (*own, *self._given, *others):
            keys.setdefault(key.secret, key)
        if not keys:
            raise UserError(
                f"{job['suffix']}: no key for {job['base_url']}; set the original key in "
                f"{variable or 'OPENAI_API_KEY'}, or pass it as FinetuningManager(api_keys=[...])"
            )
        return list(keys.values())

    def _upload_file(self, api: FinetuningApi, job: Job, path: str, md5: str) -> str:
        """Return the id of a file; uploads it unless the key's project has it."""
        data = read_training_file(path)
        if hashlib.md5(data).hexdigest() != md5:
            self._update(job, state="failed", error="the file has changed")
            raise InvalidArgument(f"{path} has changed since the job was created; create a new job")
        for file in self._files:
            if (file["md5"], file["base_url"]) == (md5, job["base_url"]):
                try:
                    known = api.get(f"/files/{file['file_id']}")
                except ServerError as error:
                    if error.status not in (400, 403, 404):  # of another project, or deleted
                        raise
                    continue
                if known.get("status") not in ("error", "deleted"):
                    print(f"{Path(path).name} already exists: {file['file_id']}")
                    return str(file["file_id"])
        found = api.upload(Path(path).name, data)
        self._files.append({"file_id": found, "md5": md5, "base_url": job["base_url"]})
        print(f"{Path(path).name} is uploaded: {found}")
        return found

    def _create_at_server(self, api: FinetuningApi, job: Job) -> None:
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
            "validation_file": job.get("validation_file_id"),
            "metadata": {JOB_ID_TAG: job["id"]},
            "method": {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
        }
        given = {key: value for key, value in body.items() if value is not None}
        self._update(job, sent=time.time())
        try:
            self._adopt_job(job, api.post("/fine_tuning/jobs", given))
        except ServerError as error:
            if not error.passing:
                self._update(job, sent=0.0)
            elif self._find_lost_job(api, job):
                return
            raise

    def _find_lost_job(self, api: FinetuningApi, job: Job) -> bool:
        """Look for the server's job whose creation response was lost, and adopt it.

        Jobs are matched by the id in their metadata or, at servers that keep none, by their file.
        """
        known = {one["job"] for one in self._jobs}
        for found in api.list_jobs(job["sent"] - MAX_CLOCK_SKEW_S):
            tag = (found.get("metadata") or {}).get(JOB_ID_TAG)
            untagged = tag is None and found.get("training_file") == job["file_id"]
            if (tag == job["id"] or untagged) and found.get("id") not in known:
                self._adopt_job(job, api.get(f"/fine_tuning/jobs/{found['id']}"))
                return True
        return False

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
        first = {"error": None} if job["job"] is None else {}
        self._update(job, **{"job": found["id"], "state": found["status"], **first, **known})

    def _update_job(self, job: Job) -> str:
        """Read a job's current state, or submit it; return a status line."""
        suffix, found = job["suffix"], dict[str, Any]()
        if job["job"] is None:
            self._submit_job(job)
        else:
            api, found = self._find_access(job)
            self._adopt_job(job, found)
            if job["state"] == "succeeded":
                self._update(job, models=_list_models(api, job, found))
                names = [one["model"] for one in job["models"]]
                more = f" and {len(names) - 1} checkpoints" if len(names) > 1 else ""
                return f"✓ {suffix}: succeeded → {names[0] if names else 'unnamed model'}{more}"
            if job["state"] in FINAL_STATES:
                return f"✗ {suffix}: {job['state']}" + (f": {job['error']}" if job["error"] else "")
        state = "waits for a slot" if job["job"] is None else job["state"]
        line = f"… {suffix} ({job['base_model']}): {state}"
        end = found.get("estimated_finish")
        if isinstance(end, int | float) and end > time.time():
            line += f", trained in about {format_duration(end - time.time(), minutes=True)}"
        return line

    def _find_access(self, job: Job) -> tuple[FinetuningApi, Any]:
        """Return the API with the first key that has access to a job, and the job there."""
        others: list[ApiKey] = []
        if job["base_url"] == OPENAI_BASE_URL:
            # Another key of the project has access, too; no other server is sent OpenAI's.
            found = ((name, os.environ[name].strip()) for name in sorted(os.environ))
            others = [ApiKey(k, n) for n, k in found if k and OPENAI_KEY_VARIABLE.fullmatch(n)]
        failed: ServerError | None = None
        for key in self._list_keys(job, others):
            api = FinetuningApi(job, key, self.timeout)
            try:
                answer = api.get(f"/fine_tuning/jobs/{job['job']}")
            except ServerError as error:
                failed = error
                if error.passing:  # any other key would wait as long
                    break
            else:
                self._keys[job["id"]] = key
                return api, answer
        assert failed
        raise failed


def _list_models(api: FinetuningApi, job: Job, found: Any) -> list[Job]:
    """Return the final model and those of checkpoints, the latest first."""
    final = found.get("fine_tuned_model")
    if not isinstance(final, str):
        return []
    try:
        listed = api.get(f"/fine_tuning/jobs/{job['job']}/checkpoints", "data")["data"]
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
