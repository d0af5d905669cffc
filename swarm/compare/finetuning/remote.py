"""Jobs at servers: each step is written down before it is taken, so that any of them may fail."""

import hashlib
import re
import time
from pathlib import Path
from typing import Any

from swarm.compare.errors import WrongValue
from swarm.compare.finetuning.client import Client, clock, duration
from swarm.compare.finetuning.keys import Key, Keys
from swarm.compare.finetuning.params import OpenaiTrainingParams
from swarm.compare.finetuning.store import Row, Store
from swarm.compare.finetuning.validation import content
from swarm.errors import UserError
from swarm.models.failures import BadRequest, NotFound, RateLimited, RequestError, code, one_line

TAG = "model_swarms"
"""The key of a job's metadata at the server that holds its id here."""

SETTLING = 60.0
"""Seconds after which a request without an answer has either made a job or never will."""

SKEW = 120.0
"""Seconds that a server's clock may be behind ours."""

DAY = 86400.0


class Remote:
    """Creates jobs at servers and follows them.

    Args:
        store: Where they are kept.
        keys: The keys that this process knows.
        timeout: Seconds for an answer.
    """

    def __init__(self, store: Store, keys: Keys, timeout: float) -> None:
        self.store, self.keys, self.timeout = store, keys, timeout

    def begin(self, params: OpenaiTrainingParams, row: Row) -> Row:
        """What is kept of a job before anything is sent; of an interrupted one, what there is."""
        key = self.keys.add(params.api_key)
        row |= {
            "state": "creating", "key_print": self.keys.print_of(key.secret),
            "key_variable": key.variable, "models": [],
        }  # fmt: skip
        if name := params.validation_file_name:
            row |= {"validation_path": str(Path(name).expanduser().resolve()),
                    "validation_md5": hashlib.md5(content(name)).hexdigest()}  # fmt: skip
        same = row.keys() - {"key_variable"}
        for old in self.store.rows("jobs"):
            if all(old.get(key) == row[key] for key in same):
                print(f"{old['suffix']}: goes on with {old['id']}, which was interrupted")
                return old
        return self.store.add("jobs", row)

    def go_on(self, job: Row) -> Row:
        """Take the steps that are left until the server has the job; gives what is kept then.

        Raises:
            RequestError: The server is not there or refuses it.
            UserError: No key is known, or a file has changed.
        """
        client = self.client(job, self._key(job))
        try:
            if job.get("sent") and (told := self._found(client, job)):
                return self._adopted(job, told)
            if (wait := job.get("sent", 0.0) + SETTLING - time.time()) > 0:
                raise UserError(
                    f"{job['suffix']}: the server may still make the job whose answer was lost; "
                    f"update_jobs looks again, best in {wait:.0f} s"
                )
            return self._sent(client, self._uploaded(client, job))
        except RateLimited as error:
            if code(error.content) != "insufficient_quota":
                self._limited(client, job, error)
                return self.store.change("jobs", job["id"], error=str(error))
            self.store.change("jobs", job["id"], state="failed", error=str(error))
            raise
        except RequestError as error:
            # Where an answer was lost there may be a job, whatever the server says since.
            sent = (self.store.row("jobs", job["id"]) or {}).get("sent")
            state = {} if error.passing or sent else {"state": "failed"}
            self.store.change("jobs", job["id"], error=str(error), **state)
            raise

    def client(self, job: Row, key: Key) -> Client:
        """The server of a job, asked with a key."""
        return Client(job["base_url"], key.secret, key.variable, self.timeout)

    def lost(self, job: Row) -> Row | None:
        """A job whose answer was lost, if the server has it; see `go_on` for errors."""
        client = self.client(job, self._key(job))
        told = self._found(client, job)
        return self._adopted(job, told) if told else None

    def _key(self, job: Row) -> Key:
        keys = self.keys.made(job)
        if not keys:
            raise no_key(job)
        return keys[0]

    def _uploaded(self, client: Client, job: Row) -> Row:
        """The job with the ids of its files at the server."""
        for kind, key in (("file", "file_id"), ("validation", "validation_file_id")):
            if job.get(f"{kind}_path") and not job.get(key):
                found = self._file(client, job, job[f"{kind}_path"], job[f"{kind}_md5"])
                job = self.store.change("jobs", job["id"], **{key: found})
        return job

    def _file(self, client: Client, job: Row, path: str, md5: str) -> str:
        """The id of a file, uploaded unless it is there: files are those of a key's project."""
        data = content(path)
        if hashlib.md5(data).hexdigest() != md5:
            self.store.change("jobs", job["id"], state="failed", error="the file has changed")
            raise WrongValue(f"{path} has changed since the job was created; create it anew")
        mine = {"md5": md5, "base_url": job["base_url"], "key_print": job["key_print"]}
        for row in self.store.rows("files"):
            # Of a file that llmcomp has uploaded, nobody knows by which key.
            if all(row.get(key, value) == value for key, value in mine.items()):
                try:
                    if client.file(row["file_id"]).get("status") not in ("error", "deleted"):
                        print(f"{Path(path).name} is there already: {row['file_id']}")
                        return str(row["file_id"])
                except (NotFound, BadRequest):
                    continue
        found = client.upload(Path(path).name, data)
        self.store.add("files", {"file_id": found, "name": path, **mine})
        print(f"{Path(path).name} is uploaded: {found}")
        return found

    def _sent(self, client: Client, job: Row) -> Row:
        job = self.store.change("jobs", job["id"], sent=time.time())
        body = _body(job)
        try:
            try:
                told = client.create(body)
            except BadRequest as error:
                if "metadata" not in str(error):
                    raise
                del body["metadata"]
                told = client.create(body)
        except RequestError as error:
            if error.passing and not isinstance(error, RateLimited):
                # The answer is lost, and perhaps nothing more.
                if told := self._found(client, job):
                    return self._adopted(job, told)
            else:
                self.store.change("jobs", job["id"], sent=0.0)
            raise
        return self._adopted(job, told)

    def _found(self, client: Client, job: Row) -> Any:
        """The server's job that a lost answer was about, if there is one."""
        known = {row.get("job") for row in self.store.rows("jobs")}
        since = job["sent"] - SKEW
        for told in client.jobs(since):
            tag = (told.get("metadata") or {}).get(TAG)
            untagged = tag is None and told.get("training_file") == job["file_id"]
            if (tag == job["id"] or untagged) and told.get("id") not in known:
                return client.job(told["id"])
        return None

    def _adopted(self, job: Row, told: Any) -> Row:
        changes = {"job": told["id"], "state": told["status"], "error": None, **resolved(told)}
        return self.store.change("jobs", job["id"], **changes)

    def _limited(self, client: Client, job: Row, error: RateLimited) -> None:
        """Say when a job may be sent, as far as the server lets us know."""
        when = f"in {duration(error.after)}" if error.after else self._slot(client, str(error))
        print(
            f"{job['suffix']}: {error}. It is kept as {job['id']}, and update_jobs sends it"
            + (f"; a slot is free {when}" if when else "")
        )

    def _slot(self, client: Client, words: str) -> str:
        if not (limit := re.search(r"(\d+) fine-?tuning (?:requests|jobs) per day", words)):
            return ""
        try:
            since = time.time() - DAY
            made = sorted(float(one.get("created_at") or 0) for one in client.jobs(since))
        except RequestError:
            return ""
        if not made:
            return "when another project's jobs are a day old; this one's has none"
        # The one of which the end brings us below the limit; other projects may have more.
        first = made[max(0, len(made) - int(limit[1]))] + DAY
        return f"at about {clock(first)}" + (
            "" if len(made) >= int(limit[1]) else ", or sooner: other projects share the limit"
        )


def no_key(job: Row) -> UserError:
    """The error of a job that no known key fits."""
    where = job.get("key_variable") or "OPENAI_API_KEY"
    return UserError(
        f"{job['suffix']}: no key for {job['base_url']}; put the one that it was made with into "
        f"{where}, or give it as FinetuningManager(api_keys=[...])"
    )


def _body(job: Row) -> dict[str, Any]:
    """The request that makes a job."""
    how = {
        "batch_size": job["batch_size"],
        "learning_rate_multiplier": job["learning_rate_multiplier"],
        "n_epochs": job["epochs"],
    }
    body = {
        "model": job["base_model"], "training_file": job["file_id"], "suffix": job["suffix"],
        "seed": job["seed"], "validation_file": job.get("validation_file_id"),
        "metadata": {TAG: job["id"]},
        "method": {"type": "supervised", "supervised": {"hyperparameters": how}},
    }  # fmt: skip
    return {key: value for key, value in body.items() if value is not None}


def resolved(told: Any) -> dict[str, Any]:
    """What a server has settled: the organisation, the seed, the hyperparameters, the error."""
    method = told.get("method") or {}
    how = (method.get(method.get("type") or "supervised") or {}).get("hyperparameters")
    how = how or told.get("hyperparameters") or {}
    error = told.get("error") or {}
    words = one_line(str(error.get("message") or error.get("code") or ""))
    found = {
        "organization_id": told.get("organization_id"), "seed": told.get("seed"),
        "epochs": how.get("n_epochs"), "batch_size": how.get("batch_size"),
        "learning_rate_multiplier": how.get("learning_rate_multiplier"),
        "trained_tokens": told.get("trained_tokens"), "error": words or None,
    }  # fmt: skip
    return {key: value for key, value in found.items() if value is not None and value != "auto"}
