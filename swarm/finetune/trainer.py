"""Gradient training of an adapter: AdamW on gold answers with early stopping on held-out ones.

Also finds, checks and writes the adapter that training starts from.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swarm._util.files import find_path, hash_file_cached, write_atomic
from swarm.engine.base_model import BaseModel
from swarm.errors import UserError
from swarm.pool.adapter import CONFIG_FILE, WEIGHTS_FILE, read_adapter, write_folder_atomic
from swarm.pool.discovery import check_base_models
from swarm.runs.run_reader import RunFolder

if TYPE_CHECKING:
    from torch import Tensor


FRESH_LABEL = "the base"
"""Label of a fresh LoRA as the start."""


def find_start_adapter(expert: str | None, run: str | None, pool: Path) -> tuple[str, Path | None]:
    """Return the label and the folder of the start; a folder of `None` is a fresh LoRA.

    Args:
        expert: Name of an expert of the pool, or folder of an adapter.
        run: A run folder, whose best initial expert is the start.
        pool: Folder of the experts.

    Raises:
        UserError: There is no such adapter.
    """
    if run:
        searched = RunFolder(find_path(run))
        name = searched.experts[searched.best_expert()[1]]
        folder = find_path(searched.config["pool"].get("folder") or "")
        if not (folder / name / CONFIG_FILE).is_file():
            raise UserError(
                f"run={run}: its best initial expert {name} is not an adapter in {folder}; "
                "give the folder of an adapter as expert="
            )
        return name, folder / name
    if not expert:
        return FRESH_LABEL, None
    for folder in (pool / expert, find_path(expert)):
        if folder.is_dir():
            read_adapter(folder)
            return folder.name, folder
    raise UserError(
        f"expert={expert}: neither an expert in {pool} nor a folder; "
        "give one of the two, or null for a fresh LoRA"
    )


def check_start_adapter(source: Path | None, targets: Sequence[str], base: BaseModel) -> None:
    """Check that the adapter in `source`, or a fresh one of `targets`, fits the base.

    Only the shapes of the base are built, not its weights.

    Raises:
        UserError: It belongs to another base, or a layer does not exist or has another shape.
    """
    import torch

    adapter = read_adapter(source) if source else None
    if adapter:
        check_base_models([adapter], base)
    model, _ = base.load_without_weights()
    layers = {
        name: (layer.in_features, layer.out_features)
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear)
    }
    for name, (inputs, outputs, _) in (adapter.shapes if adapter else {}).items():
        if layers.get(name) != (inputs, outputs):
            raise UserError(
                f"{source}: adapts {name}, {inputs} to {outputs}, which {base.path} does not "
                "have as a linear layer; give an adapter of this base, or its own base as model="
            )
    for target in [] if adapter else targets:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            have = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise UserError(
                f"targets has {target!r}, which is not a linear layer of {base.path}; "
                f"available: {have}"
            )


def write_start_adapter(
    folder: Path, source: Path | None, fresh: Callable[[], Any], label: str
) -> None:
    """Write a copy of the adapter in `source`, or the one that `fresh` adds to its model."""

    def write_files(to: Path) -> None:
        if source:
            for name in (CONFIG_FILE, WEIGHTS_FILE):
                shutil.copyfile(source / name, to / name)
        else:
            adapted = fresh()
            save_adapter(adapted, to)
            adapted.unload()

    write_folder_atomic(folder, write_files, {"copy_of": label}, "adapter")


def save_adapter(model: Any, folder: Path) -> None:
    """Write an adapter's PEFT files, without the empty model card."""
    # PEFT's default, "auto", looks up the base's configuration on the hub.
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)


def weights_digest(folder: Path) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of an adapter's weights."""
    return hash_file_cached(folder / WEIGHTS_FILE)[:16]


WARMUP_DIVISOR = 12
"""The warm-up takes this fraction of the steps."""

IGNORE_INDEX = -100
"""Target that torch's cross-entropy ignores."""

TokenPair = tuple[list[int], list[int]]
"""Token ids of a prompt, and of its answer."""


@dataclass(frozen=True)
class TrainingArguments:
    """Parameters of training an adapter.

    Args:
        steps: Maximum number of optimizer steps.
        batch: Examples per step.
        rate: Learning rate of AdamW, with a short warm-up and a linear decay to zero at `steps`.
        every: Steps between two evaluations on the held-out examples.
        patience: Evaluations without a lower loss after which training stops.
        seed: Seed of the examples' order.

    Raises:
        UserError: A value is invalid.
    """

    steps: int = 100
    batch: int = 8
    rate: float = 1e-3
    every: int = 10
    patience: int = 3
    seed: int = 42

    def __post_init__(self) -> None:
        for key in ("steps", "batch", "every", "patience"):
            value = getattr(self, key)
            if type(value) is not int or value < 1:
                raise UserError(f"{key}={value!r}: must be an integer, 1 or more")
        if type(self.rate) not in (int, float) or not 0 < self.rate <= 1e6:
            raise UserError(f"rate={self.rate!r}: must be a number above 0, at most 1e6")


@dataclass
class TrainingProgress:
    """Progress of a training.

    Attributes:
        step: Number of completed steps.
        evaluations: Evaluations: (step, mean training loss since the previous one, held-out loss).
        best: Step of the best weights.
    """

    step: int = 0
    evaluations: list[tuple[int, float | None, float | None]] = field(default_factory=list)
    best: int = 0

    def record_evaluation(self, step: int, train: float | None, held: float | None) -> bool:
        """Record an evaluation; return whether its weights are the best so far."""
        lowest = min(
            (loss for _, _, loss in self.evaluations if loss is not None), default=math.inf
        )
        self.step = step
        self.evaluations.append((step, train, held))
        better = held is None or held < lowest
        self.best = step if better else self.best
        return better

    def count_stale(self) -> int:
        """Return the number of evaluations since the best one."""
        return sum(step > self.best for step, _, _ in self.evaluations)


def mean_loss(model: Any, batch: Sequence[TokenPair]) -> tuple["Tensor", int]:
    """Return the mean cross-entropy of the answers' tokens in nats, and the number of these tokens.

    Prompts are masked. Rows are padded on the left, so that all answers end at the same position
    and logits are computed for the positions of the longest answer only.
    """
    import torch

    longest = max(len(answer) for _, answer in batch)
    width = max(len(prompt) + len(answer) for prompt, answer in batch)
    rows = [[*prompt, *answer] for prompt, answer in batch]
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    targets = torch.tensor([[IGNORE_INDEX] * (longest - len(a)) + a for _, a in batch])
    device = model.device
    # Positions count from a row's first token, not from its padding.
    position_ids = (mask.cumsum(1) - 1).clamp(min=0)
    # The logits at a position predict the next token: one position more than answer tokens, and the
    # last one is dropped. float32, as a softmax in bfloat16 is too coarse for a loss.
    logits = (
        model(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            position_ids=position_ids.to(device),
            logits_to_keep=longest + 1,
            use_cache=False,
        )
        .logits[:, -longest - 1 : -1]
        .float()
    )
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten().to(device), ignore_index=IGNORE_INDEX
    )
    return loss, sum(len(answer) for _, answer in batch)


def evaluate_loss(model: Any, pairs: Sequence[TokenPair], batch: int) -> float | None:
    """Return the mean loss of all answers' tokens in nats; `None` without pairs."""
    import torch

    total, tokens = 0.0, 0
    with torch.inference_mode():
        for start in range(0, len(pairs), batch):
            loss, count = mean_loss(model, pairs[start : start + batch])
            total, tokens = total + loss.item() * count, tokens + count
    return total / tokens if tokens else None


def batch_indices(count: int, recipe: TrainingArguments, step: int) -> list[int]:
    """Return the indices of the examples of a step; each epoch is a new permutation."""
    found: list[int] = []
    for position in range(step * recipe.batch, (step + 1) * recipe.batch):
        # Keyed by seed and epoch: a resumed training draws the same batches without replaying.
        draw = np.random.Generator(np.random.Philox(key=[recipe.seed, position // count]))
        found.append(int(draw.permutation(count)[position % count]))
    return found


class Trainer:
    """Trains the weights of a model that require gradients; resumes from its last evaluation.

    Args:
        model: A causal language model of transformers with a PEFT adapter.
        recipe: Training parameters.
        path: Checkpoint file.
        say: Called with a line of text for each evaluation.
    """

    def __init__(
        self, model: Any, recipe: TrainingArguments, path: Path, say: Callable[[str], None]
    ) -> None:
        import torch

        self.model, self.recipe, self.path, self.say = model, recipe, path, say
        # No dropout, not even the adapter's: its random state would have to be part of the
        # checkpoint.
        model.eval()
        self.progress = TrainingProgress()
        self._weights = [weight for weight in model.parameters() if weight.requires_grad]
        self._adam = torch.optim.AdamW(self._weights, lr=recipe.rate, weight_decay=0.0)
        self._best = [weight.detach().clone() for weight in self._weights]

    def train(self, examples: Sequence[TokenPair], held: Sequence[TokenPair]) -> TrainingProgress:
        """Train, and leave the model with the weights of the best evaluation; resume if possible.

        Without held-out examples, these are the weights of the last step.
        """
        recipe = self.recipe
        if self.path.is_file():
            self._load_checkpoint()
        else:
            self._evaluate(0, [], held)
        while self.progress.step < recipe.steps and self.progress.count_stale() < recipe.patience:
            end = min(self.progress.step + recipe.every, recipe.steps)
            losses = [self._train_step(examples, step) for step in range(self.progress.step, end)]
            self._evaluate(end, losses, held)
            self._save_checkpoint()
        for weight, best in zip(self._weights, self._best, strict=True):
            weight.data.copy_(best)
        return self.progress

    def _train_step(self, examples: Sequence[TokenPair], step: int) -> float:
        import torch

        steps = self.recipe.steps
        # Linear warm-up and decay; no step has a rate of 0.
        share = min((step + 1) / max(1, steps // WARMUP_DIVISOR), 1 - step / steps)
        for group in self._adam.param_groups:
            group["lr"] = self.recipe.rate * share
        batch = [examples[index] for index in batch_indices(len(examples), self.recipe, step)]
        loss, _ = mean_loss(self.model, batch)
        self._adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._adam.step()
        return loss.item()

    def _evaluate(self, step: int, losses: Sequence[float], held_out: Sequence[TokenPair]) -> None:
        train = sum(losses) / len(losses) if losses else None
        loss = evaluate_loss(self.model, held_out, self.recipe.batch)
        for name, value in (("training", train), ("held out", loss)):
            if value is not None and not math.isfinite(value):
                raise UserError(f"the {name} loss is not finite at step {step}; lower rate=")
        better = self.progress.record_evaluation(step, train, loss)
        if better:
            self._best = [weight.detach().clone() for weight in self._weights]
        loss_texts = [
            "" if value is None else f", {name} loss {value:.4f}"
            for name, value in (("training", train), ("held-out", loss))
        ]
        best = " (lowest so far)" if better and loss is not None else ""
        self.say(f"step {step:>4} of {self.recipe.steps}{''.join(loss_texts)}{best}")

    def _save_checkpoint(self) -> None:
        """Write weights, Adam's moments and evaluations as safetensors (no unpickling)."""
        from safetensors.torch import save

        state = [self._adam.state[weight] for weight in self._weights]
        kinds = {
            "weight": self._weights,
            "best": self._best,
            "average": [one["exp_avg"] for one in state],
            "square": [one["exp_avg_sq"] for one in state],
        }
        tensors = {
            f"{kind}.{i}": tensor.detach().cpu().contiguous()
            for kind, found in kinds.items()
            for i, tensor in enumerate(found)
        }
        progress_json = json.dumps(
            {"best": self.progress.best, "evaluations": self.progress.evaluations}
        )
        about = {"progress": progress_json, "sha256": content_digest(tensors, progress_json)}
        write_atomic(self.path, save(tensors, about))

    def _load_checkpoint(self) -> None:
        import torch

        tensors, progress_json = read_progress(self.path)
        progress = json.loads(progress_json)
        for i, weight in enumerate(self._weights):
            kinds = ("weight", "best", "average", "square")
            found = {kind: tensors[f"{kind}.{i}"].to(weight.device) for kind in kinds}
            weight.data.copy_(found["weight"])
            self._best[i] = found["best"]
            self._adam.state[weight] = {
                # AdamW stores its step count as a float tensor.
                "step": torch.tensor(float(progress["evaluations"][-1][0])),
                "exp_avg": found["average"],
                "exp_avg_sq": found["square"],
            }
        evaluations = [(step, train, held_out) for step, train, held_out in progress["evaluations"]]
        self.progress = TrainingProgress(evaluations[-1][0], evaluations, progress["best"])
        self.say(f"resuming after step {self.progress.step}")


def content_digest(tensors: Mapping[str, Any], progress_json: str) -> str:
    """Return the SHA-256 of a training's tensors by name and of its evaluations as text."""
    import torch

    digest = hashlib.sha256(progress_json.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        # Viewed as bytes: numpy has no bfloat16.
        digest.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_progress(path: Path) -> tuple[dict[str, Any], str]:
    """Read a checkpoint: its tensors by name, and its evaluations as JSON.

    Raises:
        UserError: The file is damaged, or of an earlier version.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        progress_json = about["progress"]
        intact = about.get("sha256", "") == content_digest(tensors, progress_json)
        if intact and "evaluations" in json.loads(progress_json):  # earlier versions lack this key
            return tensors, progress_json
    except (OSError, SafetensorError, KeyError):
        pass
    raise UserError(
        f"{path} is damaged, or of an earlier version; restore it from a copy, or remove it to "
        "restart training"
    )
