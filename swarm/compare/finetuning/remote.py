"""Jobs at servers: each step is recorded before it is taken, so that any of them may fail."""

import hashlib
import re
import time
from pathlib import Path
from typing import Any

from swarm._util.terminal import format_duration
from swarm.compare.finetuning.client import ApiKey, ApiKeyRing, FinetuningClient, format_time
from swarm.compare.finetuning.dataset import read_training_file
from swarm.compare.finetuning.params import OpenaiTrainingParams
from swarm.compare.finetuning.store import JobRow, JobStore
from swarm.errors import InvalidArgument, UserError
from swarm.models.http_errors import (
    BadRequest,
    NotFound,
    RateLimited,
    RequestError,
    error_code,
    to_one_line,
)

JOB_ID_TAG = "model_swarms"
"""Metadata key at the server with the job's id in this database."""

SETTLE_S = 60.0
"""Seconds after which a request without a response has either created a job or never will."""

MAX_CLOCK_SKEW_S = 120.0
"""Maximum seconds that a server's clock may be behind."""

SECONDS_PER_DAY = 86400.0


class RemoteJobs:
    """Creates jobs at servers and tracks them.

    Args:
        store: Database of the jobs.
        keys: Keys known to this process.
        timeout: Seconds for a response.
    """

    def __init__(self, store: JobStore, keys: ApiKeyRing, timeout: float) -> None:
        self.store, self.keys, self.timeout = store, keys, timeout

    def prepare_job(self, params: OpenaiTrainingParams, row: JobRow) -> JobRow:
        """Store a job before any request, or return an interrupted one with the same parameters."""
        key = self.keys.add_key(params.api_key)
        row |= {
            "state": "creating",
            "key_print": self.keys.hash_key(key.secret),
            "key_variable": key.variable,
            "models": [],
        }
        if name := params.validation_file_name:
            row |= {
                "validation_path": str(Path(name).expanduser().resolve()),
                "validation_md5": hashlib.md5(read_training_file(name)).hexdigest(),
            }
        same = row.keys() - {"key_variable"}
        for old in self.store.list_rows("jobs"):
            if all(old.get(key) == row[key] for key in same):
                print(f"{old['suffix']}: resuming {old['id']}, which was interrupted")
                return old
        return self.store.add_row("jobs", row)

    def submit_job(self, job: JobRow) -> JobRow:
        """Take the remaining steps until the server has the job; return the stored job.

        Raises:
            RequestError: The server is unreachable or rejects it.
            UserError: No key is known, or a file has changed.
        """
        client = self.client_for_job(job, self._creation_key(job))
        try:
            if job.get("sent") and (server_job := self._find_server_job(client, job)):
                return self._adopt_server_job(job, server_job)
            if (delay := job.get("sent", 0.0) + SETTLE_S - time.time()) > 0:
                raise UserError(
                    f"{job['suffix']}: the server may still create the job whose response was "
                    f"lost; "
                    f"call update_jobs again in {delay:.0f} s"
                )
            return self._create_job(client, self._upload_files(client, job))
        except RateLimited as error:
            if error_code(error.content) != "insufficient_quota":
                self._report_rate_limit(client, job, error)
                return self.store.update_row("jobs", job["id"], error=str(error))
            self.store.update_row("jobs", job["id"], state="failed", error=str(error))
            raise
        except RequestError as error:
            # If a response was lost, the job may exist, whatever later responses are.
            was_sent = (self.store.get_row("jobs", job["id"]) or {}).get("sent")
            state = {} if error.passing or was_sent else {"state": "failed"}
            self.store.update_row("jobs", job["id"], error=str(error), **state)
            raise

    def client_for_job(self, job: JobRow, key: ApiKey) -> FinetuningClient:
        """Return a client of the job's server with a key."""
        return FinetuningClient(job["base_url"], key.secret, key.variable, self.timeout)

    def recover_job(self, job: JobRow) -> JobRow | None:
        """Return a job whose response was lost, if the server has it; errors as `submit_job`."""
        client = self.client_for_job(job, self._creation_key(job))
        server_job = self._find_server_job(client, job)
        return self._adopt_server_job(job, server_job) if server_job else None

    def _creation_key(self, job: JobRow) -> ApiKey:
        keys = self.keys.creation_keys(job)
        if not keys:
            raise missing_key_error(job)
        return keys[0]

    def _upload_files(self, client: FinetuningClient, job: JobRow) -> JobRow:
        """Return the job with the ids of its files at the server."""
        for kind, key in (("file", "file_id"), ("validation", "validation_file_id")):
            if job.get(f"{kind}_path") and not job.get(key):
                found = self._upload_file(client, job, job[f"{kind}_path"], job[f"{kind}_md5"])
                job = self.store.update_row("jobs", job["id"], **{key: found})
        return job

    def _upload_file(self, client: FinetuningClient, job: JobRow, path: str, md5: str) -> str:
        """Return the id of a file; uploads it unless the key's project has it."""
        data = read_training_file(path)
        if hashlib.md5(data).hexdigest() != md5:
            self.store.update_row("jobs", job["id"], state="failed", error="the file has changed")
            raise InvalidArgument(f"{path} has changed since the job was created; create a new job")
        identity = {"md5": md5, "base_url": job["base_url"], "key_print": job["key_print"]}
        for row in self.store.list_rows("files"):
            # The key of a file uploaded by llmcomp is unknown.
            if all(row.get(key, value) == value for key, value in identity.items()):
                try:
                    if client.get_file(row["file_id"]).get("status") not in ("error", "deleted"):
                        print(f"{Path(path).name} already exists: {row['file_id']}")
                        return str(row["file_id"])
                except (NotFound, BadRequest):
                    continue
        found = client.upload_file(Path(path).name, data)
        self.store.add_row("files", {"file_id": found, "name": path, **identity})
        print(f"{Path(path).name} is uploaded: {found}")
        return found

    def _create_job(self, client: FinetuningClient, job: JobRow) -> JobRow:
        job = self.store.update_row("jobs", job["id"], sent=time.time())
        body = _job_request_body(job)
        try:
            try:
                server_job = client.create_job(body)
            except BadRequest as error:
                if "metadata" not in str(error):
                    raise
                del body["metadata"]
                server_job = client.create_job(body)
        except RequestError as error:
            if error.passing and not isinstance(error, RateLimited):
                # Only the response may be lost.
                if server_job := self._find_server_job(client, job):
                    return self._adopt_server_job(job, server_job)
            else:
                self.store.update_row("jobs", job["id"], sent=0.0)
            raise
        return self._adopt_server_job(job, server_job)

    def _find_server_job(self, client: FinetuningClient, job: JobRow) -> Any:
        """Return the server's job whose creation response was lost, if any.

        Jobs are matched by the id in their metadata or, at servers without metadata, by their
        training file.
        """
        known = {row.get("job") for row in self.store.list_rows("jobs")}
        since = job["sent"] - MAX_CLOCK_SKEW_S
        for server_job in client.list_jobs(since):
            tag = (server_job.get("metadata") or {}).get(JOB_ID_TAG)
            untagged = tag is None and server_job.get("training_file") == job["file_id"]
            if (tag == job["id"] or untagged) and server_job.get("id") not in known:
                return client.get_job(server_job["id"])
        return None

    def _adopt_server_job(self, job: JobRow, server_job: Any) -> JobRow:
        changes = {
            "job": server_job["id"],
            "state": server_job["status"],
            "error": None,
            **extract_job_fields(server_job),
        }
        return self.store.update_row("jobs", job["id"], **changes)

    def _report_rate_limit(self, client: FinetuningClient, job: JobRow, error: RateLimited) -> None:
        """Print when a job may be submitted, as far as the server reports it."""
        free_at = (
            f"in {format_duration(error.after, minutes=True)}"
            if error.after
            else self._next_free_slot(client, str(error))
        )
        print(
            f"{job['suffix']}: {error}. It is stored as {job['id']}; update_jobs sends it"
            + (f"; a slot is free {free_at}" if free_at else "")
        )

    def _next_free_slot(self, client: FinetuningClient, message: str) -> str:
        if not (limit := re.search(r"(\d+) fine-?tuning (?:requests|jobs) per day", message)):
            return ""
        try:
            since = time.time() - SECONDS_PER_DAY
            created = sorted(float(one.get("created_at") or 0) for one in client.list_jobs(since))
        except RequestError:
            return ""
        if not created:
            return "when another project's jobs are a day old; this one's has none"
        # The job whose expiry frees a slot; other projects may have further jobs.
        first = created[max(0, len(created) - int(limit[1]))] + SECONDS_PER_DAY
        return f"at about {format_time(first)}" + (
            "" if len(created) >= int(limit[1]) else ", or sooner: other projects share the limit"
        )


def missing_key_error(job: JobRow) -> UserError:
    """Return the error of a job without a known key."""
    variable = job.get("key_variable") or "OPENAI_API_KEY"
    return UserError(
        f"{job['suffix']}: no key for {job['base_url']}; set the original key in "
        f"{variable}, or pass it as FinetuningManager(api_keys=[...])"
    )


def _job_request_body(job: JobRow) -> dict[str, Any]:
    """Return the request body that creates a job."""
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
    return {key: value for key, value in body.items() if value is not None}


def extract_job_fields(server_job: Any) -> dict[str, Any]:
    """Return the fields set by the server: organization, seed, hyperparameters, error."""
    method = server_job.get("method") or {}
    hyperparameters = (method.get(method.get("type") or "supervised") or {}).get("hyperparameters")
    hyperparameters = hyperparameters or server_job.get("hyperparameters") or {}
    error = server_job.get("error") or {}
    message = to_one_line(str(error.get("message") or error.get("code") or ""))
    found = {
        "organization_id": server_job.get("organization_id"),
        "seed": server_job.get("seed"),
        "epochs": hyperparameters.get("n_epochs"),
        "batch_size": hyperparameters.get("batch_size"),
        "learning_rate_multiplier": hyperparameters.get("learning_rate_multiplier"),
        "trained_tokens": server_job.get("trained_tokens"),
        "error": message or None,
    }
    return {key: value for key, value in found.items() if value is not None and value != "auto"}
