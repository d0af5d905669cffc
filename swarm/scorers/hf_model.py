"""A local transformers model that scores texts: resolving its files, loading, batching."""

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import StringConstraints

from swarm._util.files import find_path, parse_json
from swarm._util.settings import Positive, Text, checked
from swarm.engine.base_model import (
    check_model_folder,
    download_from_hub,
    find_in_hub_cache,
    first_line,
    folder_hash,
    hub_unreachable_reason,
    is_hub_id,
    quiet_transformers,
    wrap_load_errors,
)
from swarm.engine.hf import BATCH_CPU, BATCH_GPU
from swarm.errors import UserError
from swarm.tasks.free_text import Scorer

T = TypeVar("T")


@checked("task.scorer")
@dataclass(eq=False)
class LocalModelScorer(Scorer):
    """A scorer with a transformers model; its weights are read from safetensors only.

    Args:
        model: A folder with a transformers model, or the id of one on the Hugging Face hub.
        device: "cpu", "cuda" or "cuda:1"; `None` is the device of the worker's own model.
        dtype: "auto" is float32 on a CPU and bfloat16 on a GPU.
        trust_remote_code: Whether the model's own code may run.
        max_tokens: Maximum number of padded tokens in one batch; `None` chooses 4,096 on a CPU and
            65,536 on a GPU. Halved permanently when the device runs out of memory.
    """

    model: Text
    device: Annotated[str, StringConstraints(pattern=r"^(cpu|cuda(:\d+)?)$")] | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    trust_remote_code: bool = False
    max_tokens: Positive | None = None

    needs_setup = True

    @abstractmethod
    def model_class(self, config: Mapping[str, Any]) -> str:
        """Return the class of transformers that opens a model with this config.json.

        Raises:
            UserError: It is no model of this kind.
        """

    def check(self) -> None:
        """See `Setup.check`; a hub model that is not on disk yet is not checked.

        Raises:
            UserError: There is no such folder, or it contains no model of this kind; or the model
                is not on disk and the hub does not respond.
        """
        if folder := self._local_folder() or find_in_hub_cache(self.model):
            self.model_class(read_config(folder))
            return
        from huggingface_hub import constants

        off = "the hub is disabled (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else ""
        if problem := off or hub_unreachable_reason(constants.ENDPOINT):
            raise UserError(f"""task.scorer.model={self.model} is not in the hub's cache and
                {problem}; give a folder with a transformers model""")

    def resolve_folder(self) -> Path:
        """Return the folder of the model's files; downloads what is missing.

        Raises:
            UserError: There is no such folder or model, or nothing could be downloaded.
        """
        return self._local_folder() or check_model_folder(
            Path(download_from_hub(self.model, self.trust_remote_code))
        )

    def _local_folder(self) -> Path | None:
        folder = find_path(self.model)
        if folder.is_dir():
            return check_model_folder(folder)
        if not is_hub_id(self.model):
            raise UserError(f"task.scorer.model={self.model}: no such folder")
        return None

    def source_digests(self) -> dict[str, str]:
        """See `Setup.source_digests`: the model, by content; downloads what is missing."""
        return {"scorer.model weights": folder_hash(self.resolve_folder(), self.trust_remote_code)}

    def open(self, device: str) -> None:
        """Load network and tokenizer; see `Setup.open`.

        Raises:
            UserError: There is no such device, or the files are not a complete model of this kind.
        """
        import torch
        import transformers

        folder = self.resolve_folder()
        kind = self.model_class(read_config(folder))
        self.where = self._choose_device(device)
        auto = "float32" if self.where == "cpu" else "bfloat16"
        dtype = getattr(torch, auto if self.dtype == "auto" else self.dtype)
        trust = {"trust_remote_code": self.trust_remote_code}
        with (
            quiet_transformers(),
            wrap_load_errors(f"task.scorer.model={self.model} cannot be opened"),
        ):
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **trust)
            self.network, loading_info = getattr(transformers, kind).from_pretrained(
                folder, dtype=dtype, use_safetensors=True, output_loading_info=True, **trust
            )
            self.network.eval().requires_grad_(False).to(self.where)
        # transformers initializes missing weights randomly, which would give random scores.
        if missing := sorted(loading_info["missing_keys"]):
            raise UserError(f"""task.scorer.model={self.model} was not trained to score texts:
                {missing[0]} is missing from its weights""")
        self.budget = self.max_tokens or (BATCH_CPU if self.where == "cpu" else BATCH_GPU)
        self._config: Any = self.network.config.get_text_config()
        stated = getattr(self._config, "pad_token_id", None)
        self._padding: int | None = None if stated is None or stated < 0 else stated

    def _choose_device(self, worker: str) -> str:
        if self.device is None or self.device == "cpu":
            return self.device or worker
        import torch

        count, number = torch.cuda.device_count(), int(self.device.partition(":")[2] or 0)
        if number >= count:
            available = f"cuda:0 to cuda:{count - 1}" if count else "none"
            raise UserError(f"""task.scorer.device={self.device}: no such GPU; allowed: {available},
                cpu""")
        return self.device

    def encode(
        self, *texts: str, special: bool = True, limit: int | None = None
    ) -> dict[str, list[int]]:
        """Return a text, or two as a pair, as token ids: "input_ids" and further inputs.

        Args:
            texts: Lone surrogates in them, which tokenizers reject, are replaced by "?".
            special: Whether the tokenizer adds its special tokens.
            limit: Maximum number of tokens, the rest is truncated; `None` is no limit, even beyond
                the model's context.
        """
        cut = {} if limit is None else {"truncation": True, "max_length": limit}
        with quiet_transformers():
            return dict(
                self.tokenizer(*map(replace_surrogates, texts), add_special_tokens=special, **cut)
            )

    def max_input_tokens(self) -> int:
        """Return the maximum number of tokens that the model can read."""
        positions = getattr(self._config, "max_position_embeddings", None) or 0
        for name, module in self.network.named_modules():
            # RoBERTa and related models count positions from the padding index on.
            if name.endswith("position_embeddings"):
                padding = getattr(module, "padding_idx", None)
                positions -= 0 if padding is None else padding + 1
        known = (self.tokenizer.model_max_length, positions, 1 << 30)
        return min(int(number) for number in known if number > 0)

    def run_batches(
        self, lengths: Sequence[int], answer: Callable[[list[int]], Sequence[T]]
    ) -> list[T]:
        """Return the results of `answer` for each text, in order.

        The longest are first, so that a batch that is too large fails at once; the maximum is then
        halved.

        Args:
            lengths: Tokens of each text.
            answer: Returns one result for each of the texts at the given indices.

        Raises:
            UserError: The longest text alone does not fit into the device's memory.
        """
        import torch

        pending = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
        found: dict[int, T] = {}
        while pending:
            tokens = max(1, lengths[pending[0]])
            chosen = pending[: max(1, self.budget // tokens)]
            try:
                found.update(zip(chosen, answer(chosen), strict=True))
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                if len(chosen) == 1:
                    raise UserError(f"""out of memory: {tokens} tokens of one text do not fit into
                        {self.model} on {self.where}; give it a separate device with
                        task.scorer.device""") from None
                self.budget = len(chosen) * tokens // 2
                continue
            pending = pending[len(chosen) :]
        return [found[i] for i in range(len(lengths))]

    def compute_logits(self, rows: Sequence[Mapping[str, Sequence[int]]]) -> list[list[float]]:
        """Return the network's logits for each text, in order; empty for a text without tokens."""
        import torch

        full = [row for row in rows if row["input_ids"]]
        accepted = inspect.signature(self.network.forward).parameters

        def forward(places: list[int]) -> list[list[float]]:
            # Padded on the right and masked: the other inputs are 0 there.
            some = [full[i] for i in places]
            fills = {"input_ids": self._padding_id(some)}
            longest = max(len(row["input_ids"]) for row in some)
            batch = {
                name: torch.tensor(
                    [
                        [*row[name], *[fills.get(name, 0)] * (longest - len(row[name]))]
                        for row in some
                    ],
                    device=self.where,
                )
                for name in some[0]
                if name != "token_type_ids" or name in accepted
            }
            with torch.inference_mode():
                found: list[list[float]] = self.network(**batch).logits.float().cpu().tolist()
            return found

        computed = iter(self.run_batches([len(row["input_ids"]) for row in full], forward))
        return [next(computed) if row["input_ids"] else [] for row in rows]

    def _padding_id(self, rows: Sequence[Mapping[str, Sequence[int]]]) -> int:
        """Return the padding id, by which decoders find the last token of a text.

        If the model defines none, it is an id that occurs in none of these texts.
        """
        if self._padding is not None:
            return self._padding
        used = {token for row in rows for token in row["input_ids"]}
        self._config.pad_token_id = next(i for i in range(self._config.vocab_size) if i not in used)
        return int(self._config.pad_token_id)


def replace_surrogates(text: str) -> str:
    """Return the text with lone surrogates, which cannot be encoded, as "?"."""
    return text.encode("utf-8", "replace").decode("utf-8")


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return the content of config.json in a model's folder.

    Raises:
        UserError: It cannot be read.
    """
    path = folder / "config.json"
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}") from None
    return content if isinstance(content, Mapping) else {}


def label_names(config: Mapping[str, Any]) -> list[str]:
    """Return the names of a classifier's outputs, in order.

    transformers omits two default names from the file.
    """
    named = config.get("id2label")
    if isinstance(named, Mapping) and named:
        return [str(named[key]) for key in sorted(named, key=int)]
    count = config.get("num_labels")
    return [f"LABEL_{i}" for i in range(count if isinstance(count, int) else 2)]
