"""The training of a LoRA on chats: what comes of it is an expert, and a kill loses a few steps."""

import hashlib
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.compare.errors import InvalidArgument
from swarm.compare.finetuning.examples import parse_examples, tokenize_examples
from swarm.compare.finetuning.store import FINAL_STATES, JobRow, JobStore
from swarm.compare.finetuning.validation import read_training_file
from swarm.errors import UserError

if TYPE_CHECKING:
    from swarm.engine.base import BaseModel

CHECKPOINT_EVERY = 10
"""Steps between two looks at the loss, each of which is gone on from after a kill."""

POOL_BASE = "base"
"""What the experts of a folder are of, as `swarm.roster.local` calls it."""

PROGRESS_FILE = "training.safetensors"


def load_base(job: JobRow) -> "BaseModel":
    """The base model of a job; nothing of it is loaded.

    Raises:
        UserError: There is none.
    """
    from swarm.roster.local import LocalModels

    named = job["base_path"]
    return LocalModels(None if named == POOL_BASE else named, job["expert_path"]).base


def expert_folder(job: JobRow) -> Path:
    """The folder of the expert that a job makes."""
    return Path(job["expert_path"]) / str(job["expert"])


def model_name(job: JobRow) -> str:
    """What a roster calls the expert: by its name in the usual folder, else with the folder's."""
    usual = Path(job["expert_folder"]) == Path("initial_experts")
    return f"local/{job['expert'] if usual else expert_folder(job)}"


def run_job(store: JobStore, id: str) -> JobRow:
    """Train the job in this process; what it comes to is kept, however it ends.

    Raises:
        UserError: There is no such job, or its training failed.
    """
    job = store.get_row("jobs", id)
    if job is None or job.get("kind") != "local":
        raise UserError(f"{store.folder}: there is no local job {id}")
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
        words = f"{type(error).__name__}: {error}"
        store.update_row("jobs", id, state="failed", error=" ".join(words.split()))
        raise


def train_job(store: JobStore, job: JobRow, folder: Path) -> JobRow:
    """Train, or go on; gives what is kept of the job then.

    Args:
        folder: What is needed to go on lies there.

    Raises:
        UserError: Something is wrong with the file, the model or a value.
    """
    from swarm.engine.device import choose_device
    from swarm.engine.tokens import context_length_of
    from swarm.finetune.gradient import TrainingArguments

    data = read_training_file(job["file_path"])
    if hashlib.md5(data).hexdigest() != job["file_md5"]:
        raise InvalidArgument(f"{job['file_path']} has changed since the job was created")
    base, found = load_base(job), parse_examples(data)
    model, tokenizer = base.load(choose_device(job["device"]))
    learnt = tokenize_examples(found, tokenizer, context_length_of(model))
    batch = min(job["batch_size"], len(learnt))
    steps = math.ceil(len(learnt) * job["epochs"] / batch)
    print(f"{job['suffix']}: {len(learnt)} answers, {steps} steps of {batch}", flush=True)
    recipe = TrainingArguments(steps, batch, job["learning_rate"], min(CHECKPOINT_EVERY, steps), steps, job["seed"])
    adapted = _load_start_adapter(job, base, model, folder)
    progress = _run_trainer(store, job, adapted, recipe, learnt, folder)
    losses = [loss for _, loss, _ in progress.looks if loss is not None]
    training = {"file_md5": job["file_md5"], "steps": steps, "losses": losses}
    note = {"job": job["id"], "tuned_from": "the base", "training": training}
    _save_expert(adapted, job, note)
    (folder / PROGRESS_FILE).unlink(missing_ok=True)
    models = [{"model": model_name(job), "epochs": job["epochs"], "step": steps}]
    return store.update_row("jobs", job["id"], state="succeeded", models=models, error=None,
                        step=steps, steps=steps, losses=losses)  # fmt: skip


def _run_trainer(
    store: JobStore, job: JobRow, adapted: Any, recipe: Any, learnt: list[Any], folder: Path
) -> Any:
    """Train an adapted model, writing down each look."""
    import torch

    from swarm.finetune.gradient import Trainer

    def report_progress(line: str) -> None:
        print(line, flush=True)
        step, loss, _ = trainer.progress.looks[-1]
        store.update_row("jobs", job["id"], step=step, steps=recipe.steps, loss=loss)

    trainer = Trainer(adapted, recipe, folder / PROGRESS_FILE, report_progress)
    try:
        return trainer.train(learnt, ())
    except torch.OutOfMemoryError:
        raise UserError(f"out of memory; lower batch_size={recipe.batch}") from None


def _load_start_adapter(job: JobRow, base: "BaseModel", model: Any, folder: Path) -> Any:
    """The model with the LoRA that training starts from; drawn once."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    from swarm.engine.sources import quiet_transformers
    from swarm.finetune.adapter import FRESH_LABEL, check_start_adapter, write_start_adapter

    check_start_adapter(None, job["target_modules"], base)

    def build_fresh_adapter() -> Any:
        how = LoraConfig(r=job["lora_rank"], lora_alpha=job["lora_alpha"],
                         target_modules=job["target_modules"], task_type="CAUSAL_LM")  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(job["seed"])
            made = get_peft_model(model, how)
        made.peft_config["default"].base_model_name_or_path = base.name or base.path
        return made

    with quiet_transformers():
        if not (folder / "start").is_dir():
            write_start_adapter(folder / "start", None, build_fresh_adapter, FRESH_LABEL)
        return PeftModel.from_pretrained(model, folder / "start", is_trainable=True)


def _save_expert(adapted: Any, job: JobRow, note: dict[str, Any]) -> None:
    from swarm.finetune.adapter import save_adapter
    from swarm.folders import write_folder_atomic

    write_folder_atomic(
        expert_folder(job), lambda to: save_adapter(adapted, to), note, "adapter",
        lambda there: there.get("job") == job["id"],
    )  # fmt: skip
