"""The training of a LoRA on chats: what comes of it is an expert, and a kill loses a few steps."""

import hashlib
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.compare.errors import WrongValue
from swarm.compare.finetuning.examples import examples, pairs
from swarm.compare.finetuning.store import FINAL, Row, Store
from swarm.compare.finetuning.validation import content
from swarm.errors import UserError

if TYPE_CHECKING:
    from swarm.engine.base import Base

LOOKS = 10
"""Steps between two looks at the loss, each of which is gone on from after a kill."""

BASE = "base"
"""What the experts of a folder are of, as `swarm.roster.local` calls it."""

PROGRESS = "training.safetensors"


def base_of(job: Row) -> "Base":
    """The base model of a job; nothing of it is loaded.

    Raises:
        UserError: There is none.
    """
    from swarm.roster.local import Locals

    named = job["base_path"]
    return Locals(None if named == BASE else named, job["expert_path"]).base


def place_of(job: Row) -> Path:
    """The folder of the expert that a job makes."""
    return Path(job["expert_path"]) / str(job["expert"])


def name_of(job: Row) -> str:
    """What a roster calls the expert: by its name in the usual folder, else with the folder's."""
    usual = Path(job["expert_folder"]) == Path("initial_experts")
    return f"local/{job['expert'] if usual else place_of(job)}"


def worked(store: Store, id: str) -> Row:
    """Train the job in this process; what it comes to is kept, however it ends.

    Raises:
        UserError: There is no such job, or its training failed.
    """
    job = store.row("jobs", id)
    if job is None or job.get("kind") != "local":
        raise UserError(f"{store.folder}: there is no local job {id}")
    if job["state"] in FINAL:
        return job
    job = store.change("jobs", id, state="running", pid=os.getpid())
    try:
        return train(store, job, store.folder / "training" / id)
    except KeyboardInterrupt:
        store.change("jobs", id, state="stopped")
        raise
    except UserError as error:
        store.change("jobs", id, state="failed", error=str(error))
        raise
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
        store.change("jobs", id, state="failed", error=" ".join(words.split()))
        raise


def train(store: Store, job: Row, folder: Path) -> Row:
    """Train, or go on; gives what is kept of the job then.

    Args:
        folder: What is needed to go on lies there.

    Raises:
        UserError: Something is wrong with the file, the model or a value.
    """
    from swarm.engine.device import chosen_device
    from swarm.engine.tokens import context_of
    from swarm.finetune.gradient import Recipe

    data = content(job["file_path"])
    if hashlib.md5(data).hexdigest() != job["file_md5"]:
        raise WrongValue(f"{job['file_path']} has changed since the job was created")
    base, found = base_of(job), examples(data)
    model, tokenizer = base.load(chosen_device(job["device"]))
    learnt = pairs(found, tokenizer, context_of(model))
    batch = min(job["batch_size"], len(learnt))
    steps = math.ceil(len(learnt) * job["epochs"] / batch)
    print(f"{job['suffix']}: {len(learnt)} answers, {steps} steps of {batch}", flush=True)
    recipe = Recipe(steps, batch, job["learning_rate"], min(LOOKS, steps), steps, job["seed"])
    adapted = _adapted(job, base, model, folder)
    progress = _trained(store, job, adapted, recipe, learnt, folder)
    losses = [loss for _, loss, _ in progress.looks if loss is not None]
    training = {"file_md5": job["file_md5"], "steps": steps, "losses": losses}
    note = {"job": job["id"], "tuned_from": "the base", "training": training}
    _save(adapted, job, note)
    (folder / PROGRESS).unlink(missing_ok=True)
    models = [{"model": name_of(job), "epochs": job["epochs"], "step": steps}]
    return store.change("jobs", job["id"], state="succeeded", models=models, error=None,
                        step=steps, steps=steps, losses=losses)  # fmt: skip


def _trained(
    store: Store, job: Row, adapted: Any, recipe: Any, learnt: list[Any], folder: Path
) -> Any:
    """Train an adapted model, writing down each look."""
    import torch

    from swarm.finetune.gradient import Trainer

    def say(line: str) -> None:
        print(line, flush=True)
        step, loss, _ = trainer.progress.looks[-1]
        store.change("jobs", job["id"], step=step, steps=recipe.steps, loss=loss)

    trainer = Trainer(adapted, recipe, folder / PROGRESS, say)
    try:
        return trainer.train(learnt, ())
    except torch.OutOfMemoryError:
        raise UserError(f"out of memory; lower batch_size={recipe.batch}") from None


def _adapted(job: Row, base: "Base", model: Any, folder: Path) -> Any:
    """The model with the LoRA that training starts from; drawn once."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    from swarm.engine.sources import quiet_transformers
    from swarm.finetune.adapter import FRESH, check_start, write_start

    check_start(None, job["target_modules"], base)

    def fresh() -> Any:
        how = LoraConfig(r=job["lora_rank"], lora_alpha=job["lora_alpha"],
                         target_modules=job["target_modules"], task_type="CAUSAL_LM")  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(job["seed"])
            made = get_peft_model(model, how)
        made.peft_config["default"].base_model_name_or_path = base.name or base.path
        return made

    with quiet_transformers():
        if not (folder / "start").is_dir():
            write_start(folder / "start", None, fresh, FRESH)
        return PeftModel.from_pretrained(model, folder / "start", is_trainable=True)


def _save(adapted: Any, job: Row, note: dict[str, Any]) -> None:
    from swarm.finetune.adapter import save_adapter
    from swarm.folders import write_folder

    write_folder(
        place_of(job), lambda to: save_adapter(adapted, to), note, "adapter",
        lambda there: there.get("job") == job["id"],
    )  # fmt: skip
