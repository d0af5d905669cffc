"""Local fine-tuning jobs: LoRA training on chats, in this process.

Training resumes from its last checkpoint, so that a killed process loses a few steps only.
"""

import hashlib
import math
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm._util.files import find_path
from swarm.compare.finetuning.dataset import (
    parse_examples,
    read_training_file,
    tokenize_examples,
)
from swarm.compare.finetuning.params import LocalTrainingParams
from swarm.compare.finetuning.store import FINAL_STATES, JobRow, JobStore
from swarm.errors import InvalidArgument, UserError
from swarm.pool.adapter import read_note

if TYPE_CHECKING:
    from swarm.engine.base_model import BaseModel


CHECKPOINT_EVERY = 10
"""Steps between two evaluations of the loss, each of which is a checkpoint."""

POOL_BASE = "base"
"""Name of the base model of a folder's experts; see `swarm.registry.local_models`."""

PROGRESS_FILE = "training.safetensors"


def load_base(job: JobRow) -> "BaseModel":
    """Return the base model of a job, without loading it.

    Raises:
        UserError: It does not exist.
    """
    from swarm.registry.local_models import LocalModels

    named = job["base_path"]
    return LocalModels(None if named == POOL_BASE else named, job["expert_path"]).base


def expert_folder(job: JobRow) -> Path:
    """Return the folder of the expert that a job creates."""
    return Path(job["expert_path"]) / str(job["expert"])


def model_name(job: JobRow) -> str:
    """Return the expert's model name: local/NAME in the default folder, else local/FOLDER."""
    is_default = Path(job["expert_folder"]) == Path("initial_experts")
    return f"local/{job['expert'] if is_default else expert_folder(job)}"


def run_job(store: JobStore, id: str) -> JobRow:
    """Train the job in this process; its outcome is stored, however it ends.

    Raises:
        UserError: The job does not exist, or its training failed.
    """
    job = store.get_row("jobs", id)
    if job is None or job.get("kind") != "local":
        raise UserError(f"{store.folder}: no local job {id}")
    if job["state"] in FINAL_STATES:
        return job
    job = store.update_row("jobs", id, state="running", pid=os.getpid())
    try:
        return train_job(store, job, store.folder / "training" / id)
    except KeyboardInterrupt:
        store.update_row("jobs", id, state="stopped")
        raise
    except UserError as error:
        store.update_row("jobs", id, state="failed", error=str(error))
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        store.update_row("jobs", id, state="failed", error=" ".join(message.split()))
        raise


def train_job(store: JobStore, job: JobRow, folder: Path) -> JobRow:
    """Start or resume training; return the stored job.

    Args:
        store: Database of the job.
        job: The job.
        folder: Folder of the checkpoint.

    Raises:
        UserError: The file, the model or a value is invalid.
    """
    from swarm.engine.base_model import choose_device
    from swarm.engine.tokenization import context_length_of
    from swarm.finetune.trainer import TrainingArguments

    data = read_training_file(job["file_path"])
    if hashlib.md5(data).hexdigest() != job["file_md5"]:
        raise InvalidArgument(f"{job['file_path']} has changed since the job was created")
    base, found = load_base(job), parse_examples(data)
    model, tokenizer = base.load(choose_device(job["device"]))
    learnt = tokenize_examples(found, tokenizer, context_length_of(model))
    batch = min(job["batch_size"], len(learnt))
    steps = math.ceil(len(learnt) * job["epochs"] / batch)
    print(f"{job['suffix']}: {len(learnt)} answers, {steps} steps of {batch}", flush=True)
    recipe = TrainingArguments(
        steps, batch, job["learning_rate"], min(CHECKPOINT_EVERY, steps), steps, job["seed"]
    )
    adapted = _load_start_adapter(job, base, model, folder)
    progress = _run_trainer(store, job, adapted, recipe, learnt, folder)
    losses = [loss for _, loss, _ in progress.evaluations if loss is not None]
    training = {"file_md5": job["file_md5"], "steps": steps, "losses": losses}
    note = {"job": job["id"], "tuned_from": "the base", "training": training}
    _save_expert(adapted, job, note)
    (folder / PROGRESS_FILE).unlink(missing_ok=True)
    models = [{"model": model_name(job), "epochs": job["epochs"], "step": steps}]
    return store.update_row(
        "jobs",
        job["id"],
        state="succeeded",
        models=models,
        error=None,
        step=steps,
        steps=steps,
        losses=losses,
    )


def _run_trainer(
    store: JobStore, job: JobRow, adapted: Any, recipe: Any, learnt: list[Any], folder: Path
) -> Any:
    """Train an adapted model, storing the progress of each evaluation."""
    import torch

    from swarm.finetune.trainer import Trainer

    def report_progress(line: str) -> None:
        print(line, flush=True)
        step, loss, _ = trainer.progress.evaluations[-1]
        store.update_row("jobs", job["id"], step=step, steps=recipe.steps, loss=loss)

    trainer = Trainer(adapted, recipe, folder / PROGRESS_FILE, report_progress)
    try:
        return trainer.train(learnt, ())
    except torch.OutOfMemoryError:
        raise UserError(f"out of memory; lower batch_size={recipe.batch}") from None


def _load_start_adapter(job: JobRow, base: "BaseModel", model: Any, folder: Path) -> Any:
    """Return the model with the initial LoRA, which is drawn once and then loaded."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    from swarm.engine.base_model import quiet_transformers
    from swarm.finetune.trainer import FRESH_LABEL, check_start_adapter, write_start_adapter  # type: ignore[attr-defined]

    check_start_adapter(None, job["target_modules"], base)

    def build_fresh_adapter() -> Any:
        lora_config = LoraConfig(
            r=job["lora_rank"],
            lora_alpha=job["lora_alpha"],
            target_modules=job["target_modules"],
            task_type="CAUSAL_LM",
        )
        with torch.random.fork_rng():
            torch.manual_seed(job["seed"])
            adapted = get_peft_model(model, lora_config)
        adapted.peft_config["default"].base_model_name_or_path = base.name or base.path
        return adapted

    with quiet_transformers():
        if not (folder / "start").is_dir():
            write_start_adapter(folder / "start", None, build_fresh_adapter, FRESH_LABEL)
        return PeftModel.from_pretrained(model, folder / "start", is_trainable=True)


def _save_expert(adapted: Any, job: JobRow, note: dict[str, Any]) -> None:
    from swarm.finetune.trainer import save_adapter
    from swarm.pool.adapter import write_folder_atomic

    write_folder_atomic(
        expert_folder(job),
        lambda to: save_adapter(adapted, to),
        note,
        "adapter",
        lambda there: there.get("job") == job["id"],
    )


DEFAULT_EXPERT_FOLDER = Path("initial_experts")
"""Default folder of experts."""


class LocalJobs:
    """Creates local jobs and tracks them."""

    def __init__(self, store: JobStore) -> None:
        self.store = store

    def prepare_job(self, params: LocalTrainingParams, row: JobRow) -> JobRow:
        """Store a job before its training, or return an interrupted one with the same parameters.

        Raises:
            UserError: The file contains what cannot be trained on, or the model does not exist.
        """
        parse_examples(read_training_file(params.file_name))
        # Relative paths would have another meaning in another working directory.
        folder, base = Path(row["expert_folder"]).expanduser(), find_path(row["base_model"])
        # The default folder is resolved as a roster does; any other is relative to this directory.
        row["expert_path"] = str(
            (find_path(folder) if folder == DEFAULT_EXPERT_FOLDER else folder).resolve()
        )
        named = row["base_model"] == POOL_BASE or not base.is_dir()
        row["base_path"] = row["base_model"] if named else str(base.resolve())
        load_base(row).on_disk()
        jobs = [job for job in self.store.list_rows("jobs") if job.get("kind") == "local"]
        for job in jobs:
            same = all(job.get(key) == value for key, value in row.items())
            if same and job["state"] not in FINAL_STATES and not self._is_running(job):
                print(f"{job['suffix']}: resuming {job['id']}, which was interrupted")
                return self.store.update_row("jobs", job["id"], state="starting")
        used = {expert_folder(job) for job in jobs if job["state"] not in ("cancelled", "deleted")}
        row |= {"expert": row["suffix"]}
        for number in range(2, len(jobs) + 1000):
            if expert_folder(row) not in used and not expert_folder(row).exists():
                break
            row["expert"] = f"{row['suffix']}-{number}"
        return self.store.add_row("jobs", row | {"state": "starting", "models": []})

    def run_in_process(self, job: JobRow) -> str:
        """Train in this process and return the model's name.

        Raises:
            UserError: Training failed.
        """
        with self.store.hold_lock(_lock_name(job), wait=False) as lock:
            if lock is None:
                raise UserError(f"{job['id']} is being trained by another process")
            job_row = run_job(self.store, job["id"])
        print(f"✓ {job_row['suffix']}: succeeded → {model_name(job_row)}")
        return model_name(job_row)

    def describe_job(self, job: JobRow) -> str:
        """Return a status line of an unfinished job."""
        alive = self._is_running(job)
        job = self.store.get_row("jobs", job["id"]) or job  # it may have ended before the lock did
        step = f"step {job.get('step', 0)} of {job.get('steps', '?')}"
        if job.get("loss") is not None:
            step += f", loss {job['loss']:.4f}"
        if alive or job["state"] in FINAL_STATES:
            return f"… {job['suffix']} ({job['base_model']}): {job['state']}, {step}"
        return f"… {job['suffix']}: interrupted at {step}; the same create_job resumes"

    def cancel_job(self, job: JobRow) -> JobRow:
        """Cancel a job.

        Raises:
            UserError: It has already ended, or a process trains it.
        """
        if job["state"] in FINAL_STATES:
            raise UserError(f"{job['id']} is {job['state']}: it cannot be cancelled")
        if self._is_running(job):
            raise UserError(
                f"{job['id']}: is running in process {job.get('pid')}; stop that process"
            )
        cancelled = self.store.update_row("jobs", job["id"], state="cancelled")
        shutil.rmtree(self.store.folder / "training" / job["id"], ignore_errors=True)
        return cancelled

    def delete_expert(self, job: JobRow) -> None:
        """Delete the expert that a job has created.

        Raises:
            UserError: The folder contains something else.
        """
        folder = expert_folder(job)
        if folder.is_dir():
            if read_note(folder).get("job") != job["id"]:
                raise InvalidArgument(
                    f"{folder}: is not an output of {job['id']}; nothing is removed"
                )
            shutil.rmtree(folder)

    def _is_running(self, job: JobRow) -> bool:
        """Return whether a process trains the job.

        A lock is released when its process ends, whereas a process id may be reused.
        """
        with self.store.hold_lock(_lock_name(job), wait=False) as lock:
            return lock is None


def _lock_name(job: JobRow) -> str:
    return f"training/{job['id']}"
