"""Fine-tuned models by the dozen: jobs are created, followed, listed, cancelled and deleted."""

import hashlib
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.compare.errors import InvalidArgument
from swarm.compare.finetuning import following
from swarm.compare.finetuning.imported import import_llmcomp_jobs
from swarm.compare.finetuning.keys import ApiKeyRing
from swarm.compare.finetuning.listing import MODEL_COLUMNS, JOB_COLUMNS, build_frame, list_job_rows, list_model_rows
from swarm.compare.finetuning.local import LocalJobs
from swarm.compare.finetuning.params import (
    LocalTrainingParams,
    OpenaiTrainingParams,
    TinkerTrainingParams,
)
from swarm.compare.finetuning.remote import RemoteJobs
from swarm.compare.finetuning.store import FINAL_STATES, JobRow, JobStore
from swarm.compare.finetuning.validation import (
    MIN_EXAMPLES,
    Finding,
    ValidationResult,
    read_training_file,
    validate_dataset,
)
from swarm.errors import UserError

if TYPE_CHECKING:
    from pandas import DataFrame


class FinetuningManager:
    """Keeps track of fine-tunings at OpenAI-compatible servers and on this machine.

    What llmcomp has left in the folder is taken in.

    Args:
        data_dir: The folder of the database and of what local training needs to go on.
        api_keys: Keys beside those of OPENAI_API_KEY and OPENAI_API_KEY_*; none is ever kept.
        timeout: Seconds for an answer of a server, with all repetitions.
        poll_seconds: Between two looks at a job that is waited for.
    """

    def __init__(
        self, data_dir: str | Path = "llmcomp_models", *, api_keys: Sequence[str] = (),
        timeout: float = 60.0, poll_seconds: float = 30.0,
    ) -> None:  # fmt: skip
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
        """Begin a fine-tuning; one that was interrupted with the same parameters is gone on with.

        Args:
            params: What it is to be.
            blocking: Wait until it is over; a local one trains in this process.

        Returns:
            The id of the job, or the new model's name with `blocking`; `None` where a file is not
            valid, which is printed.

        Raises:
            WrongValue: A file cannot be read, or the suffix is another file's already.
            UserError: The server refuses it or is not there; a job that is waited for failed; or
                it is one at Tinker, for which parts are missing here.
        """
        if isinstance(params, TinkerTrainingParams):
            raise UserError(params.missing())
        if not isinstance(params, (OpenaiTrainingParams, LocalTrainingParams)):
            raise InvalidArgument("params: has to be OpenaiTrainingParams or LocalTrainingParams")
        if not self._validate_files(params):
            return None
        row = params.to_row() | {
            "file_path": str(Path(params.file_name).expanduser().resolve()),
            "file_md5": hashlib.md5(read_training_file(params.file_name)).hexdigest(),
        }
        # Who finds a job in creation must know that nobody is at it.
        with self.store.hold_lock("creating"):
            self._check_suffix(row)
            if isinstance(params, LocalTrainingParams):
                job = self._local.prepare_job(params, row)
                job = job if blocking else self._local.start_worker(job)
            else:
                job = self._remote_jobs.submit_job(self._remote_jobs.prepare_job(params, row))
        print(f"{job['suffix']}: {job['id']} on {job['base_model']}, {job['state']}")
        if not blocking:
            return str(job["id"])
        return self._local.run_in_process(job) if job["kind"] == "local" else self._wait_for_job(job)

    def update_jobs(self) -> None:
        """Ask about every job that is not over, go on with what was interrupted, and print it."""
        import_llmcomp_jobs(self.store)
        problems = []
        remote = following.JobPoller(self._remote_jobs)
        for job in self.store.list_rows("jobs"):
            local = job["kind"] == "local"
            # A local one ends by itself, which is to be told once.
            if job["kind"] == "imported" or (job["state"] in FINAL_STATES and not self._needs_report(job)):
                continue
            try:
                job, line = (self._local if local else remote).update_job(job)
                print(line)
                if local and job["state"] in FINAL_STATES:
                    self.store.update_row("jobs", job["id"], told=True)
            except UserError as error:
                problems.append(f"  {job['id']}: {error}")
        states = [job["state"] for job in self.store.list_rows("jobs") if job["state"] != "deleted"]
        failed = sum(state in ("failed", "cancelled") for state in states)
        done = states.count("succeeded")
        print(f"under way: {len(states) - done - failed}, succeeded: {done}, failed: {failed}")
        if problems:
            print("\n".join([f"{len(problems)} could not be looked at:", *problems]))

    def get_models(self, **filters: Any) -> "DataFrame":
        """The models there are, the earlier checkpoints of each after it.

        Args:
            filters: What a column has to be, e.g. `suffix="birds"`.

        Raises:
            WrongValue: There is no such column.
        """
        import_llmcomp_jobs(self.store)
        return build_frame(list_model_rows(self.store.list_rows("jobs")), MODEL_COLUMNS, filters)

    def get_model_list(self, **filters: Any) -> list[str]:
        """The names of the models; see `get_models`."""
        return [str(name) for name in self.get_models(**filters)["model"]]

    def get_jobs(self, **filters: Any) -> "DataFrame":
        """All jobs that are not deleted, the oldest first; see `get_models`."""
        import_llmcomp_jobs(self.store)
        return build_frame(list_job_rows(self.store.list_rows("jobs")), JOB_COLUMNS, filters)

    def openai_validate_file(
        self, file_name: str, *, min_examples: int | None = None
    ) -> ValidationResult:
        """What is wrong with a training file; see `swarm.compare.finetuning.validation`.

        Args:
            min_examples: `None` is what OpenAI wants of a training file, 10.
        """
        least = MIN_EXAMPLES if min_examples is None else min_examples
        try:
            return validate_dataset(read_training_file(file_name), least)
        except InvalidArgument as error:
            return ValidationResult(False, [Finding(0, str(error))])

    def cancel(self, id: str) -> None:
        """End a job that is under way.

        Args:
            id: Ours, or the server's.

        Raises:
            UserError: There is none, it is over, or it cannot be ended.
        """
        job = self._find_job(id)
        if job["kind"] == "local":
            job = self._local.cancel_job(job)
        else:
            job = following.cancel_job(self._remote_jobs, job)
        print(f"{job['suffix']}: {job['state']}")

    def delete(self, name: str) -> None:
        """Remove a model for good, at its server or on this disk; of a job's id, all its models.

        Raises:
            UserError: There is none, its job is under way, or the server refuses.
        """
        import_llmcomp_jobs(self.store)
        owner = next((job for job in self.store.list_rows("jobs") if job["state"] != "deleted"
                      and any(one["model"] == name and not one.get("deleted")
                              for one in job.get("models", []))), None)  # fmt: skip
        job = owner or self._find_job(name)
        if job["state"] not in FINAL_STATES:
            raise UserError(f"{job['id']} is {job['state']}; cancel it first")
        names = [one["model"] for one in job.get("models", [])
                 if not one.get("deleted") and (owner is None or one["model"] == name)]  # fmt: skip
        if job["kind"] == "local":
            self._local.delete_expert(job)
        elif job["kind"] == "imported":
            print(f"{name}: forgotten here; nothing is known of where it is, nor removed there")
        elif names:
            following.delete_models(self._remote_jobs, job, names)
        models = [{**one, "deleted": one.get("deleted") or one["model"] in names}
                  for one in job.get("models", [])]  # fmt: skip
        left = [one["model"] for one in models if not one["deleted"]]
        state = job["state"] if left else "deleted"
        self.store.update_row("jobs", job["id"], models=models, state=state)
        print("\n".join(f"{one}: deleted" for one in names or [job["id"]]))

    def _needs_report(self, job: JobRow) -> bool:
        return job["kind"] == "local" and job["state"] != "deleted" and not job.get("told")

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
        """See that models of one suffix are all of one file's content."""
        import_llmcomp_jobs(self.store)
        for old in self.store.list_rows("jobs"):
            if old.get("suffix") != new["suffix"] or old["state"] in (
                "failed",
                "cancelled",
                "deleted",
            ):
                continue
            known = (
                f"suffix={new['suffix']!r} is that of {old.get('file_name')} already ({old['id']})"
            )
            what_to_do = "which model learnt what could not be told; give another suffix="
            if (
                old.get("file_name") != new["file_name"]
                and old.get("file_path") != new["file_path"]
            ):
                raise InvalidArgument(f"{known}: {what_to_do}")
            if old.get("file_md5") != new["file_md5"]:
                raise InvalidArgument(f"{known}, whose content was another then: {what_to_do}")

    def _wait_for_job(self, job: JobRow) -> str:
        while job["state"] not in FINAL_STATES:
            time.sleep(self.poll_seconds)
            job, line = following.JobPoller(self._remote_jobs).update_job(job)
            print(line)
        if job["state"] != "succeeded" or not job["models"]:
            raise UserError(f"{job['suffix']}: {job['state']}: {job.get('error') or 'no model'}")
        return str(job["models"][0]["model"])

    def _find_job(self, id: str) -> JobRow:
        import_llmcomp_jobs(self.store)
        for job in self.store.list_rows("jobs"):
            if id in (job["id"], job.get("job")) and job["state"] != "deleted":
                return job
        raise UserError(f"{id}: there is no such job or model in {self.store.folder}; "
                        "get_jobs() and get_models() list them")  # fmt: skip
