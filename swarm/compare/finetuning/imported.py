"""What llmcomp has kept of its own fine-tunings, taken into our database."""

import csv
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swarm.compare.finetuning.params import OPENAI_BASE_URL
from swarm.compare.finetuning.store import JobRow, JobStore

LLMCOMP_FILES = ("jobs.jsonl", "files.jsonl", "models.csv")

COPIED_FIELDS = ("file_name", "base_model", "suffix", "file_id", "epochs", "batch_size", "file_md5", "seed",
        "learning_rate_multiplier", "organization_id")  # fmt: skip

NUMERIC_FIELDS = ("epochs", "batch_size", "seed", "learning_rate_multiplier", "learning_rate",
           "lora_rank", "checkpoint_step")  # fmt: skip


def import_llmcomp_jobs(store: JobStore) -> int:
    """Take in jobs.jsonl, files.jsonl and models.csv of the database's folder, if they are there.

    What is there already stays as it is; files that have not changed are not read again. Lines that
    are damaged are told and left out.

    Returns:
        How many jobs and models are new.
    """
    paths = [path for name in LLMCOMP_FILES if (path := store.folder / name).is_file()]
    if not paths:
        return 0
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]
    if store.get_row("notes", digest):
        return 0
    with store.hold_lock("importing"):
        if store.get_row("notes", digest):
            return 0
        jobs, new = {row.get("job") for row in store.list_rows("jobs")}, 0
        for told in _read_records(store.folder / "jobs.jsonl"):
            if isinstance(told.get("id"), str) and told["id"] not in jobs:
                store.add_row("jobs", _convert_job(told))
                jobs.add(told["id"])
                new += 1
        files = {row["file_id"] for row in store.list_rows("files")}
        for told in _read_records(store.folder / "files.jsonl"):
            if told.get("id") not in files and told.get("md5"):
                store.add_row("files", {"file_id": told["id"], "name": told.get("name"),
                                    "md5": told["md5"], "base_url": OPENAI_BASE_URL})  # fmt: skip
        new += _import_models(store)
        store.add_row("notes", {"id": digest})
    return new


def _convert_job(told: JobRow) -> JobRow:
    epochs = told.get("epochs")
    models = []
    # model is the last epoch's, model-1 that of the one before, and so on.
    for back in range(10):
        if name := told.get(f"model-{back}" if back else "model"):
            left = epochs - back if isinstance(epochs, int) else None
            models.append({"model": name, "epochs": left, "step": None})
    state = told.get("status") or ("succeeded" if models else "unknown")
    return {
        **{key: told.get(key) for key in COPIED_FIELDS}, "kind": "openai", "base_url": OPENAI_BASE_URL,
        "job": told["id"], "state": state, "models": models,
    }  # fmt: skip


def _import_models(store: JobStore) -> int:
    """Models that no job has, as those that were trained by other means."""
    known = {one["model"] for row in store.list_rows("jobs") for one in row.get("models", [])}
    path, new = store.folder / "models.csv", 0
    if not path.is_file():
        return new
    with path.open(newline="", encoding="utf-8") as file:
        for told in csv.DictReader(file):
            if not told.get("model") or told["model"] in known:
                continue
            row: JobRow = {key: _parse_number(value) if key in NUMERIC_FIELDS else value or None
                        for key, value in told.items() if isinstance(key, str)}  # fmt: skip
            one = {"model": row.pop("model"), "epochs": row.get("epochs"),
                   "step": row.pop("checkpoint_step", None)}  # fmt: skip
            store.add_row("jobs", {**row, "kind": "imported", "state": "succeeded", "models": [one]})
            new += 1
    return new


def _parse_number(text: str | None) -> Any:
    """A cell as a number, or as it is."""
    try:
        found = float(text or "")
    except ValueError:
        return text or None
    return int(found) if found.is_integer() else found


def _read_records(path: Path) -> Iterator[JobRow]:
    if not path.is_file():
        return
    for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
        try:
            told = json.loads(line) if line.strip() else None
        except ValueError:
            print(f"{path}: line {number} is damaged and is left out")
            continue
        if isinstance(told, dict):
            yield told
