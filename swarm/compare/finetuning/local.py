"""Jobs on this machine: each trains in a process of its own, or in this one."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from swarm.compare.errors import InvalidArgument
from swarm.compare.finetuning.examples import parse_examples
from swarm.compare.finetuning.params import LocalTrainingParams
from swarm.compare.finetuning.store import FINAL_STATES, JobRow, JobStore
from swarm.compare.finetuning.training import POOL_BASE, load_base, model_name, expert_folder, run_job
from swarm.compare.finetuning.validation import read_training_file
from swarm.errors import UserError
from swarm.folders import read_note
from swarm.places import find_path

DEFAULT_EXPERT_FOLDER = Path("initial_experts")
"""The usual folder of experts."""

MAX_STARTS = 3
"""Processes that a job is given; one that was killed so often will be killed again."""

LOG_TAIL_CHARS = 300
"""Characters of a log's end that a failure repeats."""


class LocalJobs:
    """Creates jobs on this machine and follows them."""

    def __init__(self, store: JobStore) -> None:
        self.store = store

    def prepare_job(self, params: LocalTrainingParams, row: JobRow) -> JobRow:
        """What is kept of a job before it is trained; of one that was interrupted, what there is.

        Raises:
            UserError: The file holds what cannot be trained on, or there is no such model.
        """
        parse_examples(read_training_file(params.file_name))
        # From another folder the names alone would be other places.
        folder, base = Path(row["expert_folder"]).expanduser(), find_path(row["base_model"])
        # Where a roster looks for it; any other name is that of a folder from here.
        row["expert_path"] = str((find_path(folder) if folder == DEFAULT_EXPERT_FOLDER else folder).resolve())
        named = row["base_model"] == POOL_BASE or not base.is_dir()
        row["base_path"] = row["base_model"] if named else str(base.resolve())
        load_base(row).on_disk()
        jobs = [job for job in self.store.list_rows("jobs") if job.get("kind") == "local"]
        for job in jobs:
            same = all(job.get(key) == value for key, value in row.items())
            if same and job["state"] not in FINAL_STATES and not self._is_running(job):
                print(f"{job['suffix']}: goes on with {job['id']}, which was interrupted")
                return self.store.update_row("jobs", job["id"], state="starting", starts=0, told=False)
        taken = {expert_folder(job) for job in jobs if job["state"] not in ("cancelled", "deleted")}
        row |= {"expert": row["suffix"]}
        for number in range(2, len(jobs) + 1000):
            if expert_folder(row) not in taken and not expert_folder(row).exists():
                break
            row["expert"] = f"{row['suffix']}-{number}"
        return self.store.add_row("jobs", row | {"state": "starting", "models": [], "starts": 0})

    def run_in_process(self, job: JobRow) -> str:
        """Train in this process; gives the model's name.

        Raises:
            UserError: It failed.
        """
        with self.store.hold_lock(_lock_name(job), wait=False) as lock:
            if lock is None:
                raise UserError(f"{job['id']} is being trained by another process")
            self.store.update_row("jobs", job["id"], blocking=True)
            done = run_job(self.store, job["id"])
        self.store.update_row("jobs", done["id"], told=True)
        print(f"✓ {done['suffix']}: succeeded → {model_name(done)}")
        return model_name(done)

    def start_worker(self, job: JobRow) -> JobRow:
        """Train in a process that outlives this one; it holds the job's lock as long as it lives.

        Raises:
            UserError: No process can be started.
        """
        with self.store.hold_lock(_lock_name(job), wait=False) as lock:
            if lock is None:
                return job
            folder = self.store.folder / "training" / job["id"]
            job = self.store.update_row("jobs", job["id"], starts=job.get("starts", 0) + 1,
                                    pid=None, blocking=False)  # fmt: skip
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with (folder / "log.txt").open("ab") as log:
                    subprocess.Popen(
                        [sys.executable, "-m", "swarm.compare.finetuning.worker", job["id"],
                         "--data-dir", str(self.store.folder.resolve())],
                        stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                        start_new_session=True, pass_fds=[lock.fileno()],
                    )  # fmt: skip
            except OSError as error:
                raise UserError(f"{folder}: the training cannot be started: {error}") from None
        return job

    def update_job(self, job: JobRow) -> tuple[JobRow, str]:
        """A job as it is now, and a line about it; one that was killed is started again."""
        alive = self._is_running(job)
        # It may have ended between the two looks.
        job = self.store.get_row("jobs", job["id"]) or job
        suffix = job["suffix"]
        if job["state"] == "succeeded":
            return job, f"✓ {suffix}: succeeded → {model_name(job)}"
        if job["state"] in FINAL_STATES:
            return job, f"✗ {suffix}: {job['state']}: {job.get('error') or 'no reason was told'}"
        step = f"step {job.get('step', 0)} of {job.get('steps', '?')}"
        if job.get("loss") is not None:
            step += f", loss {job['loss']:.4f}"
        if alive:
            return job, f"… {suffix} ({job['base_model']}): {job['state']}, {step}"
        if job["state"] == "stopped":
            return job, f"… {suffix}: stopped by hand at {step}; create_job as before goes on"
        if job.get("starts", 0) < MAX_STARTS:
            return self.start_worker(job), f"… {suffix}: its process was killed; goes on after {step}"
        words = f"its process was killed {MAX_STARTS} times, the last time at {step}{self._log_tail(job)}"
        return self.store.update_row("jobs", job["id"], state="failed", error=words), (
            f"✗ {suffix}: failed: {words}"
        )

    def cancel_job(self, job: JobRow) -> JobRow:
        """End a job.

        Raises:
            UserError: It is over already, or it is not ours to end.
        """
        if job["state"] in FINAL_STATES:
            raise UserError(f"{job['id']} is {job['state']}: there is nothing to cancel")
        if self._is_running(job):
            if job.get("blocking"):
                raise UserError(f"{job['id']}: is trained in process {job['pid']}; stop that one")
            if not job.get("pid"):
                raise UserError(f"{job['id']} is about to start; try again")
            os.kill(job["pid"], signal.SIGTERM)
        done = self.store.update_row("jobs", job["id"], state="cancelled", told=True)
        shutil.rmtree(self.store.folder / "training" / job["id"], ignore_errors=True)
        return done

    def delete_expert(self, job: JobRow) -> None:
        """Remove the expert that a job has made.

        Raises:
            UserError: Something else lies in its place.
        """
        place = expert_folder(job)
        if place.is_dir():
            if read_note(place).get("job") != job["id"]:
                raise InvalidArgument(f"{place}: is not what {job['id']} has made; nothing is removed")
            shutil.rmtree(place)

    def _is_running(self, job: JobRow) -> bool:
        """Whether a process trains it: a lock ends with its process, a number may be another's."""
        with self.store.hold_lock(_lock_name(job), wait=False) as lock:
            return lock is None

    def _log_tail(self, job: JobRow) -> str:
        try:
            path = self.store.folder / "training" / job["id"] / "log.txt"
            words = " ".join(path.read_text("utf-8", "replace").split())
        except OSError:
            return ""
        return f"; its log ends with: {words[-LOG_TAIL_CHARS:]}" if words else ""


def _lock_name(job: JobRow) -> str:
    return f"training/{job['id']}"
