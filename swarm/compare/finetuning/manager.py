"""Fine-tuned models by the dozen: jobs are created, followed, listed, cancelled and deleted."""

import hashlib
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.compare.errors import WrongValue
from swarm.compare.finetuning import following
from swarm.compare.finetuning.imported import take_in
from swarm.compare.finetuning.keys import Keys
from swarm.compare.finetuning.listing import COLUMNS, OF_JOB, frame, jobs_of, models_of
from swarm.compare.finetuning.local import Local
from swarm.compare.finetuning.params import (
    LocalTrainingParams,
    OpenaiTrainingParams,
    TinkerTrainingParams,
)
from swarm.compare.finetuning.remote import Remote
from swarm.compare.finetuning.store import FINAL, Row, Store
from swarm.compare.finetuning.validation import (
    LEAST,
    Finding,
    ValidationResult,
    content,
    validate,
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
        self.store = Store(data_dir)
        self.timeout, self.poll_seconds = timeout, poll_seconds
        self._given = list(api_keys)
        self._local = Local(self.store)

    @cached_property
    def _remote(self) -> Remote:
        return Remote(self.store, Keys(self.store.salt(), self._given), self.timeout)

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
            raise WrongValue("params: has to be OpenaiTrainingParams or LocalTrainingParams")
        if not self._valid(params):
            return None
        row = params.told() | {
            "file_path": str(Path(params.file_name).expanduser().resolve()),
            "file_md5": hashlib.md5(content(params.file_name)).hexdigest(),
        }
        # Who finds a job in creation must know that nobody is at it.
        with self.store.held("creating"):
            self._check_suffix(row)
            if isinstance(params, LocalTrainingParams):
                job = self._local.begin(params, row)
                job = job if blocking else self._local.detached(job)
            else:
                job = self._remote.go_on(self._remote.begin(params, row))
        print(f"{job['suffix']}: {job['id']} on {job['base_model']}, {job['state']}")
        if not blocking:
            return str(job["id"])
        return self._local.here(job) if job["kind"] == "local" else self._waited(job)

    def update_jobs(self) -> None:
        """Ask about every job that is not over, go on with what was interrupted, and print it."""
        take_in(self.store)
        problems = []
        remote = following.Following(self._remote)
        for job in self.store.rows("jobs"):
            local = job["kind"] == "local"
            # A local one ends by itself, which is to be told once.
            if job["kind"] == "imported" or (job["state"] in FINAL and not self._untold(job)):
                continue
            try:
                job, line = (self._local if local else remote).update(job)
                print(line)
                if local and job["state"] in FINAL:
                    self.store.change("jobs", job["id"], told=True)
            except UserError as error:
                problems.append(f"  {job['id']}: {error}")
        states = [job["state"] for job in self.store.rows("jobs") if job["state"] != "deleted"]
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
        take_in(self.store)
        return frame(models_of(self.store.rows("jobs")), COLUMNS, filters)

    def get_model_list(self, **filters: Any) -> list[str]:
        """The names of the models; see `get_models`."""
        return [str(name) for name in self.get_models(**filters)["model"]]

    def get_jobs(self, **filters: Any) -> "DataFrame":
        """All jobs that are not deleted, the oldest first; see `get_models`."""
        take_in(self.store)
        return frame(jobs_of(self.store.rows("jobs")), OF_JOB, filters)

    def openai_validate_file(
        self, file_name: str, *, min_examples: int | None = None
    ) -> ValidationResult:
        """What is wrong with a training file; see `swarm.compare.finetuning.validation`.

        Args:
            min_examples: `None` is what OpenAI wants of a training file, 10.
        """
        least = LEAST if min_examples is None else min_examples
        try:
            return validate(content(file_name), least)
        except WrongValue as error:
            return ValidationResult(False, [Finding(0, str(error))])

    def cancel(self, id: str) -> None:
        """End a job that is under way.

        Args:
            id: Ours, or the server's.

        Raises:
            UserError: There is none, it is over, or it cannot be ended.
        """
        job = self._named(id)
        if job["kind"] == "local":
            job = self._local.cancelled(job)
        else:
            job = following.cancelled(self._remote, job)
        print(f"{job['suffix']}: {job['state']}")

    def delete(self, name: str) -> None:
        """Remove a model for good, at its server or on this disk; of a job's id, all its models.

        Raises:
            UserError: There is none, its job is under way, or the server refuses.
        """
        take_in(self.store)
        owner = next((job for job in self.store.rows("jobs") if job["state"] != "deleted"
                      and any(one["model"] == name and not one.get("deleted")
                              for one in job.get("models", []))), None)  # fmt: skip
        job = owner or self._named(name)
        if job["state"] not in FINAL:
            raise UserError(f"{job['id']} is {job['state']}; cancel it first")
        names = [one["model"] for one in job.get("models", [])
                 if not one.get("deleted") and (owner is None or one["model"] == name)]  # fmt: skip
        if job["kind"] == "local":
            self._local.deleted(job)
        elif job["kind"] == "imported":
            print(f"{name}: forgotten here; nothing is known of where it is, nor removed there")
        elif names:
            following.deleted(self._remote, job, names)
        models = [{**one, "deleted": one.get("deleted") or one["model"] in names}
                  for one in job.get("models", [])]  # fmt: skip
        left = [one["model"] for one in models if not one["deleted"]]
        state = job["state"] if left else "deleted"
        self.store.change("jobs", job["id"], models=models, state=state)
        print("\n".join(f"{one}: deleted" for one in names or [job["id"]]))

    def _untold(self, job: Row) -> bool:
        return job["kind"] == "local" and job["state"] != "deleted" and not job.get("told")

    def _valid(self, params: OpenaiTrainingParams | LocalTrainingParams) -> bool:
        local = isinstance(params, LocalTrainingParams)
        files = {params.file_name: 1 if local else LEAST}
        if isinstance(params, OpenaiTrainingParams) and params.validation_file_name:
            files.setdefault(params.validation_file_name, 1)
        for name, least in files.items():
            result = validate(content(name), least)
            if not result.valid:
                print(f"{name}: {result}")
                return False
        return True

    def _check_suffix(self, new: Row) -> None:
        """See that models of one suffix are all of one file's content."""
        take_in(self.store)
        for old in self.store.rows("jobs"):
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
                raise WrongValue(f"{known}: {what_to_do}")
            if old.get("file_md5") != new["file_md5"]:
                raise WrongValue(f"{known}, whose content was another then: {what_to_do}")

    def _waited(self, job: Row) -> str:
        while job["state"] not in FINAL:
            time.sleep(self.poll_seconds)
            job, line = following.Following(self._remote).update(job)
            print(line)
        if job["state"] != "succeeded" or not job["models"]:
            raise UserError(f"{job['suffix']}: {job['state']}: {job.get('error') or 'no model'}")
        return str(job["models"][0]["model"])

    def _named(self, id: str) -> Row:
        take_in(self.store)
        for job in self.store.rows("jobs"):
            if id in (job["id"], job.get("job")) and job["state"] != "deleted":
                return job
        raise UserError(f"{id}: there is no such job or model in {self.store.folder}; "
                        "get_jobs() and get_models() list them")  # fmt: skip
