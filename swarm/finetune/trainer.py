"""Training of a LoRA adapter on prompts and answers, with transformers' Trainer; imports torch."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerState, TrainingArguments

from swarm.errors import UserError

TokenPair = tuple[list[int], list[int]]
"""Token ids of a prompt, and of its answer."""

WARMUP_DIVISOR = 12
"""The warm-up takes this fraction of the steps."""

IGNORE_INDEX = -100
"""Target that torch's cross-entropy ignores."""

BEST_FILE, STATE_FILE = "best.safetensors", "trainer_state.json"


class AdapterTrainer(Trainer):
    """Trains the weights of a model that require gradients; resumes exactly from a checkpoint.

    AdamW without weight decay; the rate has a short warm-up and, after `trial` steps, a linear
    decay to zero, gradients are clipped to a norm of 1. The model ends with the weights of the
    lowest held-out loss (`evaluate_loss`), those of the start among them; without held-out
    examples with those of the last step.

    Args:
        model: A causal language model of transformers with a PEFT adapter.
        examples: Prompts and answers.
        batches: Indices of the examples of each step.
        rate: Learning rate.
        say: Called with a line of text every `every` steps.
        trial: Steps before the rate decays.
        held_out: Examples that select the step.
        every: Steps between two evaluations of the held-out loss, and between checkpoints.
        patience: Evaluations without a lower loss after which training stops.
        seed: Seed of dropout, if the adapter has any.
        folder: Folder of the checkpoints; `None` writes none.
        checkpoint: Checkpoint in it to resume from.
        on_checkpoint: Called after a checkpoint was written.
    """

    def __init__(
        self,
        model: Any,
        examples: Sequence[TokenPair],
        batches: Sequence[list[int]],
        rate: float,
        say: Callable[[str], None] = print,
        trial: int = 0,
        held_out: Sequence[TokenPair] = (),
        every: int = 20,
        patience: int = 0,
        seed: int = 0,
        folder: Path | None = None,
        checkpoint: Path | None = None,
        on_checkpoint: Callable[[], None] = lambda: None,
    ) -> None:
        steps = len(batches)
        arguments = TrainingArguments(
            str(folder or "unused"),
            use_cpu=model.device.type == "cpu",
            seed=seed,
            logging_steps=every,
            logging_first_step=False,
            logging_nan_inf_filter=False,
            eval_strategy="steps" if held_out else "no",
            eval_steps=every,
            eval_on_start=bool(held_out) and checkpoint is None,
            save_strategy="steps" if folder else "no",
            save_steps=every,
            save_total_limit=1,
            remove_unused_columns=False,
            disable_tqdm=True,
            log_level="error",
            report_to=[],
        )
        # One device, that of the model: not the first one, and not all of them.
        arguments.__dict__["_setup_devices"], arguments._n_gpu = model.device, 1
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        adam = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0)
        warm = max(1, steps // WARMUP_DIVISOR)
        decay = max(1, steps - trial)
        # No step has a rate of 0.
        schedule = torch.optim.lr_scheduler.LambdaLR(
            adam, lambda step: min((step + 1) / warm, 1, (steps - step) / decay)
        )
        super().__init__(
            model,
            arguments,
            train_dataset=examples,
            eval_dataset=held_out or None,
            optimizers=(adam, schedule),
        )
        self.remove_callback(PrinterCallback)
        self.batches, self.held_out, self.patience = batches, held_out, patience
        self.say, self.checkpoint, self.on_checkpoint = say, checkpoint, on_checkpoint
        self.best: dict[str, torch.Tensor] = {}

    def run(self, last: int | None = None) -> None:
        """Train, and leave the model with the best weights.

        Args:
            last: Step to end at; `None` is that of the last batch.

        Raises:
            UserError: A loss is not finite.
        """
        if self.checkpoint is not None:
            self.state = TrainerState.load_from_json(str(self.checkpoint / STATE_FILE))
            self.say(f"resuming after step {self.state.global_step}")
        self.args.max_steps = last or len(self.batches)
        if self.state.global_step < self.args.max_steps and not self._is_stale():
            self.train(resume_from_checkpoint=self.checkpoint and str(self.checkpoint))
        elif self.checkpoint is not None:
            self._load_from_checkpoint(str(self.checkpoint))
        for name, weight in self._trained_weights():
            if name in self.best:
                weight.data.copy_(self.best[name])

    @property
    def evaluations(self) -> list[tuple[int, float | None, float | None]]:
        """Evaluations: (step, mean training loss since the previous one, held-out loss)."""
        found: dict[int, dict[str, float]] = {}
        for entry in self.state.log_history:
            if "loss" in entry or "eval_loss" in entry:
                found.setdefault(int(entry["step"]), {}).update(entry)
        return [(step, one.get("loss"), one.get("eval_loss")) for step, one in found.items()]

    @property
    def losses(self) -> dict[int, float]:
        """Held-out losses by step."""
        return {step: held for step, _, held in self.evaluations if held is not None}

    @property
    def best_step(self) -> int:
        """Step of the lowest held-out loss, the first of equal ones; without any the last step."""
        losses = self.losses
        return min(losses, key=losses.__getitem__, default=int(self.state.global_step))

    def _is_stale(self) -> bool:
        stale = sum(step > self.best_step for step, _, _ in self.evaluations)
        return bool(self.held_out) and stale >= self.patience

    def _trained_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, one) for name, one in self.model.named_parameters() if one.requires_grad)

    # Hooks of transformers' Trainer.

    def get_train_dataloader(self) -> DataLoader:
        """Return the batches of all steps."""
        return DataLoader(
            self.train_dataset,
            batch_sampler=self.batches,
            collate_fn=collate_pairs,
            generator=torch.Generator(),  # leaves the global one to dropout
        )

    def compute_loss(self, model: Any, inputs: Any, *more: Any, **named: Any) -> torch.Tensor:
        """Return the mean loss of a batch."""
        return answer_loss(model, inputs)

    def evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
        """Compute the held-out loss, keep the weights if it is the lowest, stop if it is stale."""
        size = max(map(len, self.batches))
        loss = evaluate_loss(self.model, self.held_out, size)
        self.log({"eval_loss": loss})
        if self.best_step == self.state.global_step:
            self.best = {name: one.detach().clone() for name, one in self._trained_weights()}
        self.control.should_training_stop |= self._is_stale()
        self.control.should_evaluate = False  # else the last step is evaluated twice
        return {"eval_loss": loss}

    def log(self, logs: dict[str, float], *more: Any) -> None:
        """Record losses, and print a line with those of a step."""
        super().log(logs, *more)
        step, loss, held = self.evaluations[-1] if self.evaluations else (0, None, None)
        if ("eval_loss" if self.held_out else "loss") not in logs:
            return
        for name, value in (("training", loss), ("held out", held)):
            if value is not None and not math.isfinite(value):
                raise UserError(f"the {name} loss is not finite at step {step}; lower rate=")
        texts = [
            "" if value is None else f", {name} loss {value:.4f}"
            for name, value in (("training", loss), ("held-out", held))
        ]
        best = " (lowest so far)" if held is not None and self.best_step == step else ""
        self.say(f"step {step:>4} of {len(self.batches)}{''.join(texts)}{best}")

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        save_adapter(self.model, folder)
        if self.best:
            save_file({k: v.contiguous() for k, v in self.best.items()}, folder / BEST_FILE)

    def _save_checkpoint(self, *arguments: Any, **named: Any) -> None:
        super()._save_checkpoint(*arguments, **named)
        self.on_checkpoint()

    def _load_from_checkpoint(self, path: str, model: Any = None) -> None:
        super()._load_from_checkpoint(path, model)
        best = Path(path) / BEST_FILE
        self.best = load_file(best) if best.is_file() else {}


def collate_pairs(batch: Sequence[TokenPair]) -> dict[str, torch.Tensor]:
    """Return a batch of B pairs as tensors.

    Rows are padded on the left, so that all answers end at the same position and logits are
    computed for the positions of the longest answer only.

    Returns:
        "input_ids", "attention_mask" and "position_ids" [B, width], and "labels" [B, L] of the
        longest answer's L positions.
    """
    longest = max(len(answer) for _, answer in batch)
    width = max(len(prompt) + len(answer) for prompt, answer in batch)
    rows = [[*prompt, *answer] for prompt, answer in batch]
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {
        "input_ids": torch.tensor([[0] * (width - len(row)) + row for row in rows]),
        "attention_mask": mask,
        # Positions count from a row's first token, not from its padding.
        "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
        "labels": torch.tensor([[IGNORE_INDEX] * (longest - len(a)) + a for _, a in batch]),
    }


def token_losses(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the cross-entropy [B, L] of the answers' tokens in nats, 0 beside them."""
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    targets = inputs.pop("labels")
    longest = targets.shape[1]
    # The logits at a position predict the next token: one position more than answer tokens, and the
    # last one is dropped. float32, as a softmax in bfloat16 is too coarse for a loss.
    found = model(**inputs, logits_to_keep=longest + 1, use_cache=False).logits
    logits = found[:, -longest - 1 : -1].float()
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return losses.view_as(targets)


def answer_loss(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean cross-entropy of the answers' tokens in nats; prompts do not count."""
    return token_losses(model, inputs).sum() / (inputs["labels"] != IGNORE_INDEX).sum()


def evaluate_loss(model: Any, pairs: Sequence[TokenPair], batch: int) -> float:
    """Return minus the logarithm of the mean probability of the whole answers.

    The mean probability is the expected share of right answers. The mean of the logarithms, the
    cross-entropy, is that of a few confident errors: among few items it stops the training where
    right answers still become more.
    """
    found = []
    model.eval()
    with torch.inference_mode():
        for start in range(0, len(pairs), batch):
            inputs = collate_pairs(pairs[start : start + batch])
            found.append(-token_losses(model, inputs).sum(dim=1))
    return math.log(len(pairs)) - torch.cat(found).double().logsumexp(0).item()


def shuffled_batches(examples: int, batch: int, steps: int, seed: int) -> list[list[int]]:
    """Return the indices of the examples of each step; each epoch is a new permutation."""
    rows: list[int] = []
    epoch = 0
    while len(rows) < batch * steps:
        draw = np.random.Generator(np.random.Philox(key=[seed, epoch]))
        rows += draw.permutation(examples).tolist()
        epoch += 1
    return [rows[start : start + batch] for start in range(0, batch * steps, batch)]


def save_adapter(model: Any, folder: Path) -> None:
    """Write an adapter's PEFT files, without the empty model card."""
    # PEFT's default, "auto", looks up the base's configuration on the hub.
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
