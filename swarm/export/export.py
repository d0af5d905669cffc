"""Export of an adapter, a merged model or a GGUF file, optionally pushed to the hub."""

import re
import shlex
import shutil
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import yaml

from swarm._util.files import as_path, parse_json
from swarm._util.settings import Count, Positive, Text, checked
from swarm.engine.base_model import SAFE_FILES, BaseModel, quiet_transformers, wrap_load_errors
from swarm.errors import UserError
from swarm.export import gguf_writer, routed
from swarm.export.model_card import render_card
from swarm.export.ranks import cut_rank, describe_cut
from swarm.export.requests import Mixture, read_parts, semantic_router, write_parts
from swarm.export.source import read_source
from swarm.pool.adapter import (
    CONFIG_FILE,
    ROUTER_FILE,
    VLLM_RANKS,
    WEIGHTS_FILE,
    Adapter,
    is_replaceable,
    read_adapter,
    read_routed_adapter,
    write_folder_atomic,
)

MAX_SHARD_SIZE = "5GB"
"""Maximum size of one file of weights."""

ROUTER_CONFIG_FILE = "semantic_router.yaml"

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


def check_repository(repository: str) -> None:
    """Check that a repository can be pushed to, without network access.

    Raises:
        UserError: It is not a repository's name, the hub is disabled, or there is no login.
    """
    from huggingface_hub import constants, get_token

    for wrong, reason in (
        (not re.fullmatch(r"[\w.-]+/[\w.-]+", repository), "must be user/name"),
        (constants.HF_HUB_OFFLINE, "the hub is disabled (HF_HUB_OFFLINE)"),
        (get_token() is None, "log in first, with `hf auth login` or HF_TOKEN"),
    ):
        if wrong:
            raise UserError(f"push_to_hub={repository}: {reason}")


def push_folder(folder: Path, repository: str) -> str:
    """Upload the folder's files, to a new private repository if there is none; return the URL.

    Raises:
        UserError: The hub is unreachable, or rejects the upload.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    with wrap_load_errors(f"push_to_hub={repository}: {folder} is written, but the upload failed"):
        hub = HfApi()
        address = hub.create_repo(repository, private=True, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Export")
        return str(address)


def merge_adapter(base: BaseModel, adapter: Adapter, dtype: str) -> Any:
    """Return the base with W + s B A at each adapted module, on the CPU.

    Loads the base in float32, 4 bytes of main memory per weight; the sum is rounded once to
    `dtype`.

    Raises:
        UserError: The base does not exist, or the adapter does not fit it.
    """
    import torch

    model, _ = base.load("cpu")
    layers = dict(model.named_modules())
    for name, (inputs, outputs, _) in adapter.shapes.items():
        layer = layers.get(name)
        if not isinstance(layer, torch.nn.Linear) or layer.weight.shape != (outputs, inputs):
            raise UserError(
                f"{adapter.folder}: it adapts {name}, {inputs} to {outputs}, which is not a linear "
                "layer of this base; set the base it was trained on by base="
            )
        first, second = adapter.load_factors(name)
        change = second.float() @ first.float()
        # A new parameter: a weight tied to the embedding must not change there.
        layer.weight = torch.nn.Parameter(layer.weight.detach() + change, requires_grad=False)
        if layer is model.get_output_embeddings():
            model.config.tie_word_embeddings = False
    return model.to(getattr(torch, dtype))


def copy_model(source: Path, folder: Path, weights: bool = True, code: bool = False) -> None:
    """Copy a model's files: configuration and tokenizer, optionally weights and code."""
    kinds = [*SAFE_FILES, *(["*.py"] if code else []), "LICENSE*", "NOTICE*"]
    left_out = set() if weights else {path for kind in WEIGHT_FILES for path in source.glob(kind)}
    for path in {path for kind in kinds for path in source.glob(kind)} - left_out:
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
    format: Literal["peft", "merged", "gguf", "gguf_lora", "parts"] = "peft"
    rank: Positive | None = None
    dtype: Literal["bfloat16", "float32", "float16"] | None = None
    base: Text | None = None
    push_to_hub: Text | None = None
    point: Count | None = None
    baseline: Text | None = None
    quantize: Literal["q8_0", "q4_0"] | None = None

    def __post_init__(self) -> None:
        if self.dtype and self.format != "merged":
            raise UserError(f"dtype={self.dtype}: only with format=merged")
        if self.quantize and self.format != "gguf":
            raise UserError(f"quantize={self.quantize}: only with format=gguf")
        self.folder, self.merged = as_path(self.to), self.format in ("merged", "gguf")
        self.source = read_source(self.given, self.point, self.baseline)
        if self.source.routes and self.format != "peft":
            raise UserError(
                f"format={self.format}: {self.source.folder} has an adapter for each of "
                f"{len(self.source.routes)} kinds of prompts; use format=peft, or export one of "
                f"its folders, {self.source.adapter_folders[0]}"
            )
        if self.source.is_full_model and (self.dtype or not self.merged):
            raise UserError(
                f"{self.source.folder} is a full model: export it with format=merged, which "
                "copies it, or format=gguf, and without dtype"
            )
        if self.rank and (self.source.is_full_model or self.format == "parts"):
            what = "a full model" if self.source.is_full_model else "not one adapter"
            raise UserError(f"rank={self.rank}: {what} has no rank to cut; omit it")
        self.gguf_file = ""
        if self.format.startswith("gguf"):
            kind = (self.quantize or "F16").upper() if self.merged else "lora-F32"
            self.gguf_file = f"{self.folder.resolve().name}-{kind}.gguf"

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
        with TemporaryDirectory() as place:
            if self.rank:
                self.source = cut_rank(self.source, self.rank, Path(place, "cut"), self.base)
            return self._write()

    def _write(self) -> list[str]:
        card = self.render_card()

        def write_files(folder: Path) -> None:
            if self.gguf_file:
                self._write_gguf(folder)
            elif self.merged:
                self._write_merged(folder)
            elif self.format == "parts":
                write_parts(self._parts, folder, self._llama_config, self.source.base_name)
            else:
                self._copy_adapters(folder)
            (folder / "README.md").write_text(card, encoding="utf-8")

        note = {**self.source.note, "exported": {"of": self.source.name, "as": self.format}}
        kind = "model" if self.merged else "adapter"
        write_folder_atomic(self.folder, write_files, note, kind, is_export)
        size = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        lines = [f"wrote {self.to}: {size / 1e6:.3g} MB"]
        lines += describe_cut(self.source.note["cut"]) if self.rank else []
        if self.push_to_hub:
            address = push_folder(self.folder, self.push_to_hub)
            lines.append(f"uploaded to the hub: {address}")
        if self.source.unfinished:
            lines.append(self.source.unfinished)
        return [*lines, self._serve_command(str(self.folder))]

    def _copy_adapters(self, folder: Path) -> None:
        if found := read_routed_adapter(self.source.folder):
            shutil.copyfile(self.source.folder / ROUTER_FILE, folder / ROUTER_FILE)
            shutil.copyfile(routed.__file__, folder / "routed.py")
            rules = semantic_router(found[0], self.source.base_name or "BASE")
            text = yaml.safe_dump(rules, sort_keys=False, allow_unicode=True)
            (folder / ROUTER_CONFIG_FILE).write_text(text, encoding="utf-8")
        for adapter in self.source.adapter_folders:
            target = folder / adapter.relative_to(self.source.folder)
            target.mkdir(exist_ok=True)
            for name in (CONFIG_FILE, WEIGHTS_FILE):
                shutil.copyfile(adapter / name, target / name)

    def _write_merged(self, folder: Path) -> None:
        if self.source.is_full_model:
            return copy_model(self.source.folder, folder)
        base = self._local_base
        copy_model(Path(str(base.path)), folder, weights=False, code=base.trust_remote_code)
        model = merge_adapter(base, read_adapter(self.source.folder), self.dtype or "bfloat16")
        with quiet_transformers(), wrap_load_errors(f"{self.to}: the model cannot be written"):
            model.save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE)

    @cached_property
    def _local_base(self) -> BaseModel:
        """The base in its local folder, float32."""
        base = self.source.load_base(self.base)
        if self.source.is_full_model:
            base = BaseModel(str(self.source.folder))
        nothing: dict[str, Any] = dict.fromkeys(("name", "wheel", "wheel_sha256", "wheel_file"))
        return replace(base, path=base.resolve(), dtype="float32", **nothing)

    @cached_property
    def _base_config(self) -> dict[str, Any]:
        path = Path(str(self._local_base.path)) / "config.json"
        found: dict[str, Any] = parse_json(path.read_text(encoding="utf-8"))
        return found

    @cached_property
    def _parts(self) -> Mixture:
        return read_parts(self.source)

    @property
    def _llama_config(self) -> dict[str, Any] | None:
        """The base's config.json for llama.cpp, which adds adapters as the delta space does."""
        if self.source.note.get("space") == "factor":
            return None
        gguf_writer.check_architecture(self._base_config, str(self._local_base.path))
        return self._base_config

    def _check_gguf(self) -> None:
        """Check that architecture and tokenizer can be written, before anything is loaded."""
        base = self._local_base
        gguf_writer.check_architecture(self._base_config, str(base.path))
        if self.merged:
            tokenizer = base.load_tokenizer(str(base.path))
            rules = parse_json(tokenizer.backend_tokenizer.to_str())
            gguf_writer.find_pre_tokenizer(rules, str(base.path))

    def _write_gguf(self, folder: Path) -> None:
        """Write the GGUF file and a Modelfile."""
        base, name = self._local_base, self.folder.resolve().name
        tokenizer, file = base.load_tokenizer(str(base.path)), self.gguf_file
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

    def render_card(self) -> str:
        """Return the model card."""
        dtype: str | None = self.dtype or "bfloat16"
        if self.source.is_full_model:
            dtype = None
        if self.format == "gguf":
            dtype = self.quantize or "float16"
        words = ["python", "-m", "swarm.export", f"search/{as_path(self.given).name}"]
        words.append(f"to={self.folder.name}")
        for key in ("format", "rank", "point", "baseline", "dtype", "quantize"):
            value = getattr(self, key)
            words += [f"{key}={value}"] if value not in (None, "peft") else []
        # The title is the name elsewhere; the command has the folder.
        title = self.push_to_hub or self.folder.resolve().name
        return render_card(
            self.source,
            self.base,
            title,
            self.merged,
            self.gguf_file,
            dtype=dtype,
            parts=self.format == "parts",
            serve=self._serve_command(title),
            command=shlex.join(words),
        )

    def _serve_command(self, name: str) -> str:
        """Return the command that serves the export under this path or name."""
        label = Path(name).name
        if self.format == "gguf":
            return f"ollama create {label} -f {name}/Modelfile"
        if self.format == "gguf_lora":
            return f"llama-cli -m BASE.gguf --lora {name}/{self.gguf_file}"
        if self.merged:
            return f"vllm serve {name}"
        if self.format == "parts":
            if self.source.note.get("space") == "factor":
                return f"lorax-launcher --model-id {self.source.base_name or 'BASE'}"
            files = ",".join(f"{name}/{row.name}.gguf" for _, row in self._parts)
            return f"llama-server -m BASE.gguf --lora-init-without-apply --lora {files}"
        rank = self.source.max_rank()
        allowed = next((size for size in VLLM_RANKS if size >= rank), None)
        if allowed is None:
            most = VLLM_RANKS[-1]
            return f"(vLLM serves adapters up to rank {most}, not {rank}: export it merged)"
        modules = " ".join(f"{one}={name}/{one}" for one in self.source.routes)
        return (
            f"vllm serve {self.source.base_name or 'BASE'} --enable-lora "
            f"--max-lora-rank {allowed} --lora-modules {modules or f'{label}={name}'}"
        )


def is_export(note: dict[str, Any]) -> bool:
    """Return whether a folder with this swarm.json was written by an export."""
    return "exported" in note
