"""Manager of fine-tuned models: create, track, list, cancel and delete jobs.

Contains the polling of jobs at servers, the tables of models and jobs, and `FinetuningManager`.
"""

import hashlib
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm._util.terminal import format_duration
from swarm.compare.finetuning.client import ApiKeyRing, FinetuningClient, format_time
from swarm.compare.finetuning.dataset import (
    MIN_EXAMPLES,
    Finding,
    ValidationResult,
    read_training_file,
    validate_dataset,
)
from swarm.compare.finetuning.local import LocalJobs
from swarm.compare.finetuning.params import (
    LocalTrainingParams,
    OpenaiTrainingParams,
    TinkerTrainingParams,
)
from swarm.compare.finetuning.remote import RemoteJobs, extract_job_fields, missing_key_error
from swarm.compare.finetuning.store import FINAL_STATES, JobRow, JobStore, import_llmcomp_jobs
from swarm.errors import InvalidArgument, UserError
from swarm.models.http_errors import (
    AccessDenied,
    BadRequest,
    NotFound,
    RequestError,
    to_one_line,
)

if TYPE_CHECKING:
    from pandas import DataFrame


SAFETY_CHECK_S = 20 * 60
"""Approximate duration of OpenAI's safety checks after training, in seconds."""


class JobPoller:
    """Polls servers for jobs during one update; an unreachable server is requested only once."""

    def __init__(self, remote: RemoteJobs) -> None:
        self.remote, self.store = remote, remote.store
        self._dead: dict[tuple[str, str], RequestError] = {}

    def update_job(self, job: JobRow) -> tuple[JobRow, str]:
        """Return the current job and a status line.

        Raises:
            UserError: No key is known, no key has access to the job, or the server is unreachable.
        """
        if job.get("job") is None:
            with self.store.hold_lock("creating", wait=False) as free:
                if free is None:
                    return job, f"… {job['suffix']}: is being created by another process"
                # The row read before the lock was acquired may be outdated.
                current = self.store.get_row("jobs", job["id"]) or job
                if current.get("job") is None and current["state"] == "creating":
                    current = self.remote.submit_job(current)
                    if current.get("job") is None:
                        return current, f"… {job['suffix']}: waits for a slot"
                return (
                    current,
                    f"… {current['suffix']} ({current['base_model']}): {current['state']}",
                )
        client, server_job = self.find_client(job)
        changes = {"state": server_job["status"], **extract_job_fields(server_job)}
        if server_job["status"] == "succeeded":
            changes["models"] = self._list_models(client, job | changes, server_job)
        job = self.store.update_row("jobs", job["id"], **changes)
        return job, self._status_line(client, job, server_job)

    def find_client(self, job: JobRow) -> tuple[FinetuningClient, Any]:
        """Return the first client with access to a job, and the job's metadata."""
        failed: RequestError | None = None
        for key in self.remote.keys.access_keys(job):
            endpoint = (job["base_url"], key.secret)
            if endpoint in self._dead:
                failed = self._dead[endpoint]
                continue
            client = self.remote.client_for_job(job, key)
            try:
                server_job = client.get_job(job["job"])
            except (AccessDenied, NotFound, BadRequest) as error:
                # The key may belong to another project.
                failed = error
                continue
            except RequestError as error:
                failed = self._dead[endpoint] = error
                continue
            self.store.update_row(
                "jobs",
                job["id"],
                key_variable=key.variable,
                key_print=self.remote.keys.hash_key(key.secret),
            )
            return client, server_job
        raise failed or missing_key_error(job)

    def _list_models(self, client: FinetuningClient, job: JobRow, server_job: Any) -> list[JobRow]:
        """Return the final model and those of checkpoints, the latest first."""
        final = server_job.get("fine_tuned_model")
        if not isinstance(final, str):
            return []
        try:
            found = client.list_checkpoints(job["job"])
        except (NotFound, BadRequest):
            found = []
        steps = {
            one["fine_tuned_model_checkpoint"]: one["step_number"]
            for one in found
            if isinstance(one.get("fine_tuned_model_checkpoint"), str)
            and type(one.get("step_number")) is int
        }
        last = steps.pop(final, None) or max(steps.values(), default=None)
        models: list[JobRow] = [{"model": final, "epochs": job["epochs"], "step": last}]
        for name, step in sorted(steps.items(), key=lambda one: -one[1]):
            models.append(
                {"model": name, "epochs": _epochs_at_step(job["epochs"], step, last), "step": step}
            )
        return models

    def _status_line(self, client: FinetuningClient, job: JobRow, server_job: Any) -> str:
        suffix, state = job["suffix"], job["state"]
        if state == "succeeded":
            names = [one["model"] for one in job["models"]]
            more = f" and {len(names) - 1} checkpoints" if len(names) > 1 else ""
            return f"✓ {suffix}: succeeded → {names[0] if names else 'unnamed model'}{more}"
        if state in FINAL_STATES:
            reason = f": {job['error']}" if job.get("error") else ""
            return f"✗ {suffix}: {state}{reason}"
        parts = [f"… {suffix} ({job['base_model']}): {state}"]
        if type(end := server_job.get("estimated_finish")) in (int, float):
            remaining = end - time.time()
            parts.append(
                f"trained at about {format_time(end)} "
                f"({format_duration(remaining, minutes=True)}), "
                f"usable some {SAFETY_CHECK_S // 60} min later"
                if remaining > 0
                else "training is about to end"
            )
        if state == "running" and (event := self._latest_event(client, job)):
            parts.append(event)
        return ", ".join(parts)

    def _latest_event(self, client: FinetuningClient, job: JobRow) -> str:
        """Return the current phase, or the last event's message."""
        try:
            messages = [str(one.get("message") or "") for one in client.list_events(job["job"])]
        except RequestError:
            return ""
        if any("usage policies" in one.lower() for one in messages):
            return "trained, in the safety checks"
        return f"last event: {to_one_line(messages[0])}" if messages else ""


def _epochs_at_step(epochs: Any, step: int, last: int | None) -> Any:
    """Return the number of epochs completed at a step; a fraction within an epoch."""
    if type(epochs) not in (int, float) or not last:
        return None
    found = epochs * step / last
    return round(found) if abs(found - round(found)) < 0.05 else round(found, 2)


def cancel_job(remote: RemoteJobs, job: JobRow) -> JobRow:
    """Cancel a job at its server, or drop one that was not submitted.

    Raises:
        UserError: It has already ended, or the server does not confirm.
    """
    if job["state"] in FINAL_STATES:
        raise UserError(f"{job['id']} is {job['state']}: it cannot be cancelled")
    if job.get("job") is None:
        with remote.store.hold_lock("creating", wait=False) as free:
            if free is None:
                raise UserError(f"{job['id']} is being created by another process; try again")
            try:
                found = remote.recover_job(job) if job.get("sent") else None
            except (NotFound, BadRequest) as error:
                print(f"{job['suffix']}: check at the server whether it has the job; {error}")
                found = None
            if found is None:
                return remote.store.update_row("jobs", job["id"], state="cancelled")
            job = found
    client, _ = JobPoller(remote).find_client(job)
    server_job = client.cancel_job(job["job"])
    return remote.store.update_row("jobs", job["id"], state=server_job["status"])


def delete_models(remote: RemoteJobs, job: JobRow, names: list[str]) -> None:
    """Delete models at a job's server; models that do not exist any more are not an error.

    Raises:
        UserError: No key is known, or the server rejects the request.
    """
    client, _ = JobPoller(remote).find_client(job)
    for name in names:
        try:
            client.delete_model(name)
        except NotFound:
            print(f"{name}: was deleted already")


MODEL_COLUMNS = (
    "model",
    "base_model",
    "file_name",
    "file_id",
    "file_md5",
    "suffix",
    "batch_size",
    "learning_rate_multiplier",
    "epochs",
    "seed",
    "learning_rate",
    "lora_rank",
    "checkpoint_step",
)

JOB_COLUMNS = (
    "id",
    "kind",
    "state",
    "suffix",
    "base_model",
    "file_name",
    "file_md5",
    "job",
    "model",
    "created",
    "error",
)


def list_model_rows(jobs: Sequence[JobRow]) -> list[JobRow]:
    """Return one row per model, with the fields of its job."""
    return [
        {**job, "model": one["model"], "epochs": one["epochs"], "checkpoint_step": one["step"]}
        for job in jobs
        for one in job.get("models", [])
        if job["state"] != "deleted" and not one.get("deleted")
    ]


def list_job_rows(jobs: Sequence[JobRow]) -> list[JobRow]:
    """Return the jobs that are not deleted, each with its final model."""
    rows = []
    for job in jobs:
        if job["state"] != "deleted":
            models = [one["model"] for one in job.get("models", []) if not one.get("deleted")]
            created = time.strftime("%Y-%m-%d %H:%M", time.localtime(job["created"]))
            rows.append({**job, "model": models[0] if models else None, "created": created})
    return rows


def build_frame(rows: list[JobRow], columns: Sequence[str], filters: dict[str, Any]) -> "DataFrame":
    """Build a frame of the rows that match the filters; numbers may be given as text.

    Raises:
        InvalidArgument: A filter does not name a column.
    """
    import pandas

    if unknown := sorted(filters.keys() - set(columns)):
        raise InvalidArgument(
            f"{', '.join(unknown)}: no such column; there are {',  '.join(columns)}"
        )
    selected = [
        [row.get(column) for column in columns]
        for row in rows
        if all(_matches_filter(row.get(key), value) for key, value in filters.items())
    ]
    return pandas.DataFrame(selected, columns=list(columns), dtype=object).infer_objects()


def _matches_filter(value: Any, expected: Any) -> bool:
    if isinstance(expected, str) and isinstance(value, int | float):
        try:
            return value == float(expected)
        except ValueError:
            return False
    return bool(value == expected)


class FinetuningManager:
    """Tracks fine-tunings at OpenAI-compatible servers and on this machine.

    Jobs that llmcomp has stored in the folder are imported.

    Args:
        data_dir: Folder of the database and of checkpoints of local training.
        api_keys: Keys beside those of OPENAI_API_KEY and OPENAI_API_KEY_*; never stored.
        timeout: Seconds for a server's response, including retries.
        poll_seconds: Seconds between two polls of a job with `blocking`.
    """

    def __init__(
        self,
        data_dir: str | Path = "llmcomp_models",
        *,
        api_keys: Sequence[str] = (),
        timeout: float = 60.0,
        poll_seconds: float = 30.0,
    ) -> None:
        self.store = JobStore(data_dir)
        self.timeout, self.poll_seconds = timeout, poll_seconds
        self._given = list(api_keys)
        self._local = LocalJobs(self.store)

    @cached_property
    def _remote_jobs(self) -> RemoteJobs:
        return RemoteJobs(self.store, ApiKeyRing(self.store.load_salt(), self._given), self.timeout)

    def create_job(
        self,
        params: OpenaiTrainingParams | LocalTrainingParams | TinkerTrainingParams,
        *,
        blocking: bool = False,
    ) -> str | None:
        """Create a fine-tuning job, or resume an interrupted one with the same parameters.

        Args:
            params: Parameters of the job; a local one is trained in this process.
            blocking: Wait until a server's job has ended.

        Returns:
            The id of the job, or the new model's name with `blocking`; `None` if a file is invalid,
                whose errors are printed.

        Raises:
            InvalidArgument: A file cannot be read, or another file has the same suffix.
            UserError: The server rejects it or is unreachable; a blocking job failed; or it is a
                Tinker job, which is not supported here.
        """
        if isinstance(params, TinkerTrainingParams):
            raise UserError(params.missing())
        if not isinstance(params, (OpenaiTrainingParams, LocalTrainingParams)):
            raise InvalidArgument("params: must be OpenaiTrainingParams or LocalTrainingParams")
        if not self._validate_files(params):
            return None
        row = params.to_row() | {
            "file_path": str(Path(params.file_name).expanduser().resolve()),
            "file_md5": hashlib.md5(read_training_file(params.file_name)).hexdigest(),
        }
        # A process that finds a job in state "creating" must be sure that no other one is creating
        # it.
        with self.store.hold_lock("creating"):
            self._check_suffix(row)
            if isinstance(params, LocalTrainingParams):
                job = self._local.prepare_job(params, row)
            else:
                job = self._remote_jobs.submit_job(self._remote_jobs.prepare_job(params, row))
        print(f"{job['suffix']}: {job['id']} on {job['base_model']}, {job['state']}")
        if job["kind"] == "local":
            name = self._local.run_in_process(job)
            return name if blocking else str(job["id"])
        return self._wait_for_job(job) if blocking else str(job["id"])

    def update_jobs(self) -> None:
        """Update every unfinished job and print its status."""
        import_llmcomp_jobs(self.store)
        problems = []
        remote = JobPoller(self._remote_jobs)
        for job in self.store.list_rows("jobs"):
            if job["kind"] == "imported" or job["state"] in FINAL_STATES:
                continue
            if job["kind"] == "local":
                print(self._local.describe_job(job))
                continue
            try:
                print(remote.update_job(job)[1])
            except UserError as error:
                problems.append(f"  {job['id']}: {error}")
        states = [job["state"] for job in self.store.list_rows("jobs") if job["state"] != "deleted"]
        failed = sum(state in ("failed", "cancelled") for state in states)
        succeeded = states.count("succeeded")
        print(
            f"running: {len(states) - succeeded - failed}, succeeded: {succeeded}, failed: {failed}"
        )
        if problems:
            print("\n".join([f"{len(problems)} could not be updated:", *problems]))

    def get_models(self, **filters: Any) -> "DataFrame":
        """Return the models, each followed by its earlier checkpoints.

        Args:
            filters: Values by column, e.g. `suffix="birds"`.

        Raises:
            InvalidArgument: A column does not exist.
        """
        import_llmcomp_jobs(self.store)
        return build_frame(list_model_rows(self.store.list_rows("jobs")), MODEL_COLUMNS, filters)

    def get_model_list(self, **filters: Any) -> list[str]:
        """Return the names of the models; see `get_models`."""
        return [str(name) for name in self.get_models(**filters)["model"]]

    def get_jobs(self, **filters: Any) -> "DataFrame":
        """Return all jobs that are not deleted, the oldest first; see `get_models`."""
        import_llmcomp_jobs(self.store)
        return build_frame(list_job_rows(self.store.list_rows("jobs")), JOB_COLUMNS, filters)

    def openai_validate_file(
        self, file_name: str, *, min_examples: int | None = None
    ) -> ValidationResult:
        """Validate a training file; see `swarm.compare.finetuning.dataset`.

        Args:
            file_name: JSONL file of chats.
            min_examples: Minimum number of examples; `None` is OpenAI's, 10.
        """
        least = MIN_EXAMPLES if min_examples is None else min_examples
        try:
            return validate_dataset(read_training_file(file_name), least)
        except InvalidArgument as error:
            return ValidationResult(False, [Finding(0, str(error))])

    def cancel(self, id: str) -> None:
        """Cancel an unfinished job.

        Args:
            id: Id of the job in the database or at the server.

        Raises:
            UserError: It does not exist, has already ended, or cannot be cancelled.
        """
        job = self._find_job(id)
        if job["kind"] == "local":
            job = self._local.cancel_job(job)
        else:
            job = cancel_job(self._remote_jobs, job)
        print(f"{job['suffix']}: {job['state']}")

    def delete(self, name: str) -> None:
        """Delete a model permanently, at its server or on this disk.

        Args:
            name: Name of the model, or a job's id to delete all of its models.

        Raises:
            UserError: It does not exist, its job is unfinished, or the server rejects the request.
        """
        import_llmcomp_jobs(self.store)
        owner = next(
            (
                job
                for job in self.store.list_rows("jobs")
                if job["state"] != "deleted"
                and any(
                    one["model"] == name and not one.get("deleted") for one in job.get("models", [])
                )
            ),
            None,
        )
        job = owner or self._find_job(name)
        if job["state"] not in FINAL_STATES:
            raise UserError(f"{job['id']} is {job['state']}; cancel it first")
        names = [
            one["model"]
            for one in job.get("models", [])
            if not one.get("deleted") and (owner is None or one["model"] == name)
        ]
        if job["kind"] == "local":
            self._local.delete_expert(job)
        elif job["kind"] == "imported":
            print(
                f"{name}: removed from the local list; its location is unknown, so nothing was "
                f"deleted there"
            )
        elif names:
            delete_models(self._remote_jobs, job, names)
        models = [
            {**one, "deleted": one.get("deleted") or one["model"] in names}
            for one in job.get("models", [])
        ]
        remaining = [one["model"] for one in models if not one["deleted"]]
        state = job["state"] if remaining else "deleted"
        self.store.update_row("jobs", job["id"], models=models, state=state)
        print("\n".join(f"{one}: deleted" for one in names or [job["id"]]))

    def _validate_files(self, params: OpenaiTrainingParams | LocalTrainingParams) -> bool:
        local = isinstance(params, LocalTrainingParams)
        files = {params.file_name: 1 if local else MIN_EXAMPLES}
        if isinstance(params, OpenaiTrainingParams) and params.validation_file_name:
            files.setdefault(params.validation_file_name, 1)
        for name, least in files.items():
            result = validate_dataset(read_training_file(name), least)
            if not result.valid:
                print(f"{name}: {result}")
                return False
        return True

    def _check_suffix(self, new: JobRow) -> None:
        """Check that all models with one suffix were trained on the same file content."""
        import_llmcomp_jobs(self.store)
        for old in self.store.list_rows("jobs"):
            if old.get("suffix") != new["suffix"] or old["state"] in (
                "failed",
                "cancelled",
                "deleted",
            ):
                continue
            known = (
                f"suffix={new['suffix']!r} is already used for {old.get('file_name')} ({old['id']})"
            )
            what_to_do = "the models would be indistinguishable; give another suffix="
            if (
                old.get("file_name") != new["file_name"]
                and old.get("file_path") != new["file_path"]
            ):
                raise InvalidArgument(f"{known}: {what_to_do}")
            if old.get("file_md5") != new["file_md5"]:
                raise InvalidArgument(f"{known}, whose content has changed since: {what_to_do}")

    def _wait_for_job(self, job: JobRow) -> str:
        while job["state"] not in FINAL_STATES:
            time.sleep(self.poll_seconds)
            job, line = JobPoller(self._remote_jobs).update_job(job)
            print(line)
        if job["state"] != "succeeded" or not job["models"]:
            raise UserError(f"{job['suffix']}: {job['state']}: {job.get('error') or 'no model'}")
        return str(job["models"][0]["model"])

    def _find_job(self, id: str) -> JobRow:
        import_llmcomp_jobs(self.store)
        for job in self.store.list_rows("jobs"):
            if id in (job["id"], job.get("job")) and job["state"] != "deleted":
                return job
        raise UserError(
            f"{id}: no such job or model in {self.store.folder}; "
            "get_jobs() and get_models() list them"
        )
