"""Export of an adapter, a merged model or a GGUF file, optionally pushed to the hub."""

import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from swarm._util.files import as_path, parse_json
from swarm._util.settings import Count, Text, checked
from swarm.engine.base_model import (
    SAFE_FILES,
    BaseModel,
    quiet_transformers,
    wrap_load_errors,
)
from swarm.errors import UserError
from swarm.export import gguf_writer, source
from swarm.export.model_card import ModelCard
from swarm.pool.adapter import (
    CONFIG_FILE,
    ROUTER_FILE,
    VLLM_RANKS,
    WEIGHTS_FILE,
    Adapter,
    is_replaceable,
    read_adapter,
    write_folder_atomic,
)


def check_repository(repository: str) -> None:
    """Check that a repository can be pushed to, without network access.

    Raises:
        UserError: It is not a repository's name, the hub is disabled, or there is no login.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
        owner, _, name = repository.partition("/")
    except HFValidationError:
        owner = name = ""
    if not (owner and name):
        raise UserError(f"push_to_hub={repository}: must be user/name")
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"push_to_hub={repository}: the hub is disabled (HF_HUB_OFFLINE)")
    if get_token() is None:
        raise UserError(f"push_to_hub={repository}: log in first, with `hf auth login` or HF_TOKEN")


def push_folder(folder: Path, repository: str, private: bool) -> str:
    """Create the repository if needed, upload the folder's files, and return the URL.

    Raises:
        UserError: The hub is unreachable, or rejects the upload.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    with wrap_load_errors(f"push_to_hub={repository}: {folder} is written, but the upload failed"):
        hub = HfApi()
        address = hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Export")
        return str(address)


MAX_SHARD_SIZE = "5GB"
"""Maximum size of one file of weights."""

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


def write_merged(base: BaseModel, adapter: Adapter, dtype: str, folder: Path) -> None:
    """Write W + s B A at each adapted module, summed in float32 and rounded once to `dtype`.

    Loads the base once, in float32: 4 bytes of main memory per weight. Tokenizer files are copied.

    Raises:
        UserError: The base does not exist, or the adapter does not fit it.
    """
    base = _local_base(base)
    copy_model(Path(str(base.path)), folder, weights=False, code=base.trust_remote_code)
    model = merge_adapter(base, adapter, dtype)
    with quiet_transformers(), wrap_load_errors(f"{folder.name}: the model cannot be written"):
        model.save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE)


def _local_base(base: BaseModel) -> BaseModel:
    """Return the base in its local folder, float32."""
    nothing: dict[str, Any] = dict.fromkeys(("name", "wheel", "wheel_sha256", "wheel_file"))
    return replace(base, path=base.resolve(), dtype="float32", **nothing)


def merge_adapter(base: BaseModel, adapter: Adapter, dtype: str) -> Any:
    """Return the base with the adapter added, of type `dtype`, on the CPU."""
    import torch

    model, _ = base.load("cpu")
    for name in adapter.shapes:
        layer = _find_layer(model, name, adapter)
        first, second = adapter.load_factors(name)
        change = second.float() @ first.float()
        # A new parameter: a weight tied to the embedding must not change there.
        layer.weight = torch.nn.Parameter(layer.weight.detach() + change, requires_grad=False)
        if layer is model.get_output_embeddings():
            model.config.tie_word_embeddings = False
    return model.to(getattr(torch, dtype))


def _find_layer(model: Any, name: str, adapter: Adapter) -> Any:
    inputs, outputs, _ = adapter.shapes[name]
    try:
        layer = model.get_submodule(name)
        if tuple(layer.weight.shape) == (outputs, inputs):
            return layer
    except AttributeError:
        pass
    raise UserError(
        f"{adapter.folder}: it adapts {name}, {inputs} to {outputs}, which is not a linear "
        "layer of this base; set the base it was trained on by base="
    )


def copy_model(source: Path, folder: Path, weights: bool = True, code: bool = False) -> None:
    """Copy a model's files: configuration and tokenizer, optionally weights and code."""
    kinds = [*SAFE_FILES, *(["*.py"] if code else []), "LICENSE*", "NOTICE*"]
    left_out = set() if weights else {path for kind in WEIGHT_FILES for path in source.glob(kind)}
    for path in sorted({path for kind in kinds for path in source.glob(kind)} - left_out):
        if path.is_file() and path.name != "swarm.json":
            shutil.copyfile(path, folder / path.name)


@checked()
@dataclass(eq=False)
class Export:
    """An export; construction is cheap, `write` does the work.

    Args:
        given: A run folder, or an adapter's.

    The others are described in conf/export.yaml.

    Raises:
        UserError: A value is invalid, or the source does not exist.
    """

    given: Text
    to: Text
    format: Literal["peft", "merged", "gguf", "gguf_lora"] = "peft"
    particle: Count | None = None
    dtype: Literal["bfloat16", "float32", "float16"] | None = None
    base: Text | None = None
    push_to_hub: Text | None = None
    private: bool = True
    point: Count | None = None
    baseline: Text | None = None
    quantize: Literal["q8_0", "q4_0"] | None = None
    route: Text | None = None

    def __post_init__(self) -> None:
        for key, value, wanted in (
            ("dtype", self.dtype, "merged"),
            ("quantize", self.quantize, "gguf"),
        ):
            if value is not None and self.format != wanted:
                raise UserError(f"{key}={value}: only with format={wanted}")
        self.folder, self.merged = as_path(self.to), self.format in ("merged", "gguf")
        found = source.read_source(self.given, self.particle, self.point, self.baseline)
        self.source = found.choose_route(self.route)
        if self.source.routes and self.format != "peft":
            raise UserError(
                f"format={self.format}: {self.source.folder} has an adapter for each of "
                f"{len(self.source.routes)} kinds of prompts; use format=peft, or export one with "
                f"route=NAME: {', '.join(self.source.routes)}"
            )
        if self.source.is_full_model and (self.dtype or not self.merged):
            raise UserError(
                f"{self.source.folder} is a full model: export it with format=merged, which "
                "copies it, or format=gguf, and without dtype"
            )
        self._stored: str | None = self.dtype or "bfloat16"
        if self.source.is_full_model:
            self._stored = None
        if self.format == "gguf":
            self._stored = self.quantize or "float16"

    def write(self) -> list[str]:
        """Write the folder and push it to the hub if requested; return lines for the user.

        Raises:
            UserError: Something is missing, or the folder contains something else; nothing is
                half-written then.
        """
        if not is_replaceable(self.folder, is_export):
            raise UserError(
                f"to={self.to}: contains something other than an export; choose another folder"
            )
        if self.push_to_hub:
            check_repository(self.push_to_hub)
        if self.gguf_file:
            self._check_gguf()
        fill = self._file_writer()
        card = self._build_card().render()

        def write_files(folder: Path) -> None:
            fill(folder)
            (folder / "README.md").write_text(card, encoding="utf-8")

        about = {"of": self.source.name, "as": self.format}
        note = {**self.source.note, "exported": about}
        write_folder_atomic(
            self.folder, write_files, note, "model" if self.merged else "adapter", is_export
        )
        lines = [
            f"wrote {self.to}: {format_size(self.folder)}",
            self._serve_command(str(self.folder)),
        ]
        if self.source.unfinished_note:
            lines.insert(1, self.source.unfinished_note)
        if self.push_to_hub:
            lines.insert(
                1,
                "uploaded to the hub: " + push_folder(self.folder, self.push_to_hub, self.private),
            )
        return lines

    def _file_writer(self) -> Callable[[Path], None]:
        """Return a function that writes the files into a folder."""
        if self.gguf_file:
            return self._write_gguf
        if self.source.is_full_model:
            return lambda folder: copy_model(self.source.folder, folder)
        if self.merged:
            base, adapter = self._base_model, read_adapter(self.source.folder)
            return lambda folder: write_merged(base, adapter, self._stored or "", folder)

        return self._copy_adapters

    def _copy_adapters(self, folder: Path) -> None:
        if self.source.routes:
            shutil.copyfile(self.source.folder / ROUTER_FILE, folder / ROUTER_FILE)
        for adapter in self.source.adapter_folders:
            target = folder / adapter.relative_to(self.source.folder)
            target.mkdir(exist_ok=True)
            for name in (CONFIG_FILE, WEIGHTS_FILE):
                shutil.copyfile(adapter / name, target / name)

    @cached_property
    def _base_model(self) -> BaseModel:
        if self.source.is_full_model:
            return BaseModel(str(self.source.folder))
        return self.source.load_base(self.base)

    @property
    def gguf_file(self) -> str | None:
        """Name of the GGUF file; `None` for another format."""
        if not self.format.startswith("gguf"):
            return None
        kind = (self.quantize or "F16").upper() if self.merged else "lora-F32"
        return f"{self.folder.resolve().name}-{kind}.gguf"

    def _check_gguf(self) -> None:
        """Check the base before anything is loaded.

        Raises:
            UserError: Its architecture or its tokenizer has no GGUF equivalent here.
        """
        base = self._base_model
        gguf_writer.check_architecture(self._base_config, str(base.path))
        if self.merged:
            tokenizer = base.load_tokenizer(base.resolve())
            rules = parse_json(tokenizer.backend_tokenizer.to_str())
            gguf_writer.find_pre_tokenizer(rules, str(base.path))

    @property
    def _base_config(self) -> dict[str, Any]:
        found: dict[str, Any] = parse_json(
            (Path(self._base_model.resolve()) / "config.json").read_text(encoding="utf-8")
        )
        return found

    def _write_gguf(self, folder: Path) -> None:
        """Write the GGUF file and a Modelfile."""
        base, name = _local_base(self._base_model), self.folder.resolve().name
        tokenizer, file = base.load_tokenizer(str(base.path)), str(self.gguf_file)
        if not self.merged:
            adapter = read_adapter(self.source.folder)
            gguf_writer.write_lora_gguf(adapter, self._base_config, folder / file, name)
        else:
            if self.source.is_full_model:
                model, _ = base.load("cpu")
            else:
                model = merge_adapter(base, read_adapter(self.source.folder), "float32")
            gguf_writer.write_gguf(model, tokenizer, folder / file, name, self.quantize)
        text = gguf_writer.build_modelfile(file, tokenizer, not self.merged)
        (folder / "Modelfile").write_text(text, encoding="utf-8")

    def _build_card(self) -> ModelCard:
        title = self.push_to_hub or self.folder.resolve().name
        # The title is the name elsewhere; the command has the folder.
        return ModelCard(
            self.source,
            self.merged,
            self._stored,
            title,
            self._serve_command(title),
            self._command(),
            self.gguf_file,
        )

    def _command(self) -> str:
        """Return the command of this export, with the keys that are set."""
        words = ["python", "-m", "swarm.export", f"search/{as_path(self.given).name}"]
        words.append(f"to={self.folder.name}")
        for key in ("format", "particle", "point", "baseline", "route", "dtype", "quantize"):
            value = getattr(self, key)
            words += [f"{key}={value}"] if value not in (None, "peft") else []
        return shlex.join(words)

    def _serve_command(self, name: str) -> str:
        """Return the command that serves the export under this path or name."""
        if self.format == "gguf":
            return f"ollama create {Path(name).name} -f {name}/Modelfile"
        if self.format == "gguf_lora":
            return f"llama-cli -m BASE.gguf --lora {name}/{self.gguf_file}"
        if self.merged:
            return f"vllm serve {name}"
        # vLLM accepts only certain values of --max-lora-rank.
        rank = max(self.source.ranks())
        max_rank = next((size for size in VLLM_RANKS if size >= rank), None)
        if max_rank is None:
            return (
                f"(vLLM serves adapters up to rank {VLLM_RANKS[-1]}, not {rank}: export it merged)"
            )
        label = Path(name).name
        modules = " ".join(f"{one}={name}/{one}" for one in self.source.routes)
        return (
            f"vllm serve {self.source.base_name or 'BASE'} --enable-lora "
            f"--max-lora-rank {max_rank} --lora-modules {modules or f'{label}={name}'}"
        )


def is_export(note: dict[str, Any]) -> bool:
    """Return whether a folder with this swarm.json was written by an export."""
    return "exported" in note


def format_size(folder: Path) -> str:
    """Return the total size of the files."""
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return f"{total / 1e6:.3g} MB"
