"""How jobs at servers are doing: their states, models, checkpoints and when they will be done."""

import time
from typing import Any

from swarm.compare.finetuning.client import FinetuningClient, format_time, format_wait
from swarm.compare.finetuning.remote import RemoteJobs, missing_key_error, extract_job_fields
from swarm.compare.finetuning.store import FINAL_STATES, JobRow
from swarm.errors import UserError
from swarm.models.failures import AccessDenied, BadRequest, NotFound, RequestError, to_one_line

SAFETY_CHECK_S = 20 * 60
"""Seconds that OpenAI's safety checks take after training, roughly."""


class JobPoller:
    """Asks servers about jobs; for one round of updates, in which nobody dead is asked twice."""

    def __init__(self, remote: RemoteJobs) -> None:
        self.remote, self.store = remote, remote.store
        self._dead: dict[tuple[str, str], RequestError] = {}

    def update_job(self, job: JobRow) -> tuple[JobRow, str]:
        """A job as it is now, and a line about it.

        Raises:
            UserError: No key is known, or none of them may see the job, or the server is not there.
        """
        if job.get("job") is None:
            with self.store.hold_lock("creating", wait=False) as free:
                if free is None:
                    return job, f"… {job['suffix']}: is being created by another process"
                # What was read before the lock was ours may be old.
                now = self.store.get_row("jobs", job["id"]) or job
                if now.get("job") is None and now["state"] == "creating":
                    now = self.remote.submit_job(now)
                    if now.get("job") is None:
                        return now, f"… {job['suffix']}: waits for a slot"
                return now, f"… {now['suffix']} ({now['base_model']}): {now['state']}"
        client, told = self.find_client(job)
        changes = {"state": told["status"], **extract_job_fields(told)}
        if told["status"] == "succeeded":
            changes["models"] = self._list_models(client, job | changes, told)
        job = self.store.update_row("jobs", job["id"], **changes)
        return job, self._status_line(client, job, told)

    def find_client(self, job: JobRow) -> tuple[FinetuningClient, Any]:
        """The first client that may see a job, and what it is told."""
        failed: RequestError | None = None
        for key in self.remote.keys.access_keys(job):
            place = (job["base_url"], key.secret)
            if place in self._dead:
                failed = self._dead[place]
                continue
            client = self.remote.client_for_job(job, key)
            try:
                told = client.get_job(job["job"])
            except (AccessDenied, NotFound, BadRequest) as error:
                # Another project's key, perhaps.
                failed = error
                continue
            except RequestError as error:
                failed = self._dead[place] = error
                continue
            self.store.update_row("jobs", job["id"], key_variable=key.variable,
                              key_print=self.remote.keys.hash_key(key.secret))  # fmt: skip
            return client, told
        raise failed or missing_key_error(job)

    def _list_models(self, client: FinetuningClient, job: JobRow, told: Any) -> list[JobRow]:
        """The final model and those of earlier steps, the latest first."""
        final = told.get("fine_tuned_model")
        if not isinstance(final, str):
            return []
        try:
            found = client.list_checkpoints(job["job"])
        except (NotFound, BadRequest):
            found = []
        steps = {one["fine_tuned_model_checkpoint"]: one["step_number"] for one in found
                 if isinstance(one.get("fine_tuned_model_checkpoint"), str)
                 and type(one.get("step_number")) is int}  # fmt: skip
        last = steps.pop(final, None) or max(steps.values(), default=None)
        models: list[JobRow] = [{"model": final, "epochs": job["epochs"], "step": last}]
        for name, step in sorted(steps.items(), key=lambda one: -one[1]):
            models.append({"model": name, "epochs": _epochs_at_step(job["epochs"], step, last),
                           "step": step})  # fmt: skip
        return models

    def _status_line(self, client: FinetuningClient, job: JobRow, told: Any) -> str:
        suffix, state = job["suffix"], job["state"]
        if state == "succeeded":
            names = [one["model"] for one in job["models"]]
            more = f" and {len(names) - 1} checkpoints" if len(names) > 1 else ""
            return f"✓ {suffix}: succeeded → {names[0] if names else 'no model named'}{more}"
        if state in FINAL_STATES:
            reason = f": {job['error']}" if job.get("error") else ""
            return f"✗ {suffix}: {state}{reason}"
        parts = [f"… {suffix} ({job['base_model']}): {state}"]
        if type(end := told.get("estimated_finish")) in (int, float):
            left = end - time.time()
            parts.append(f"trained at about {format_time(end)} ({format_wait(left)}), usable some "
                         f"{SAFETY_CHECK_S // 60} min later" if left > 0
                         else "training is to end any moment")  # fmt: skip
        if state == "running" and (event := self._latest_event(client, job)):
            parts.append(event)
        return ", ".join(parts)

    def _latest_event(self, client: FinetuningClient, job: JobRow) -> str:
        """The phase, or the last event's words."""
        try:
            words = [str(one.get("message") or "") for one in client.list_events(job["job"])]
        except RequestError:
            return ""
        if any("usage policies" in one.lower() for one in words):
            return "trained, in the safety checks"
        return f"last event: {to_one_line(words[0])}" if words else ""


def _epochs_at_step(epochs: Any, step: int, last: int | None) -> Any:
    """How many epochs a step is the end of; a fraction inside one."""
    if type(epochs) not in (int, float) or not last:
        return None
    found = epochs * step / last
    return round(found) if abs(found - round(found)) < 0.05 else round(found, 2)


def cancel_job(remote: RemoteJobs, job: JobRow) -> JobRow:
    """End a job at its server, or drop one that has not come there.

    Raises:
        UserError: It is over already, or the server does not say that it ends.
    """
    if job["state"] in FINAL_STATES:
        raise UserError(f"{job['id']} is {job['state']}: there is nothing to cancel")
    if job.get("job") is None:
        with remote.store.hold_lock("creating", wait=False) as free:
            if free is None:
                raise UserError(f"{job['id']} is being created by another process; try again")
            try:
                found = remote.recover_job(job) if job.get("sent") else None
            except (NotFound, BadRequest) as error:
                print(f"{job['suffix']}: see at the server whether it has a job; {error}")
                found = None
            if found is None:
                return remote.store.update_row("jobs", job["id"], state="cancelled")
            job = found
    client, _ = JobPoller(remote).find_client(job)
    told = client.cancel_job(job["job"])
    return remote.store.update_row("jobs", job["id"], state=told["status"])


def delete_models(remote: RemoteJobs, job: JobRow, names: list[str]) -> None:
    """Remove models at a job's server; those that are gone already are well too.

    Raises:
        UserError: No key is known, or the server refuses.
    """
    client, _ = JobPoller(remote).find_client(job)
    for name in names:
        try:
            client.delete_model(name)
        except NotFound:
            print(f"{name}: was gone already")
