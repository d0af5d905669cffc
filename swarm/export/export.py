"""One export: what is taken, as what, and where it goes."""

import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from swarm.adapters import CONFIG_FILE, VLLM_RANKS, WEIGHTS_FILE, read_adapter
from swarm.engine.base import DTYPES, BaseModel
from swarm.errors import UserError
from swarm.export import hub, source
from swarm.export.card import ModelCard
from swarm.export.licences import collect_input_licences, find_licence
from swarm.export.merged import copy_model, write_merged
from swarm.folders import is_replaceable, write_folder_atomic
from swarm.places import as_path

EXPORT_FORMATS = ("peft", "merged")


class Export:
    """What a command line asks for; cheap to make, `write` does the work.

    Args:
        given: A run folder, or an adapter's.
        to, format, particle, dtype, base, push_to_hub, private, point: See conf/export.yaml.

    Raises:
        UserError: A value is not allowed, or the source is not there.
    """

    def __init__(
        self, given: str, to: str | None, format: str = "peft", particle: int | None = None,
        dtype: str | None = None, base: str | None = None, push_to_hub: str | None = None,
        private: bool = True, point: int | None = None,
    ) -> None:  # fmt: skip
        if to is None or not str(to).strip():
            raise UserError("to is missing: give the folder to write, e.g. to=exported/first")
        if format not in EXPORT_FORMATS:
            raise UserError(f"format={format}: must be one of {', '.join(EXPORT_FORMATS)}")
        if dtype is not None and (format != "merged" or dtype not in DTYPES[1:]):
            raise UserError(
                f"dtype={dtype}: with format=merged one of {', '.join(DTYPES[1:])}, else left out"
            )
        if not isinstance(private, bool):
            raise UserError(f"private={private}: must be true or false")
        self.to, self.merged, self.private = as_path(str(to)), format == "merged", private
        self.repository = push_to_hub
        self.source = source.read_source(given, particle, point)
        if self.source.is_full_model and (dtype or not self.merged):
            raise UserError(
                f"{self.source.folder} is a whole model: export it with format=merged, which "
                "copies it, and without dtype"
            )
        self.dtype = None if self.source.is_full_model else dtype or "bfloat16"
        self._given_base = base

    def write(self) -> list[str]:
        """Write the folder, put it on the hub if that is asked for; gives what to tell the user.

        Raises:
            UserError: Something is missing, or the folder holds something else; nothing is
                half-written then.
        """
        if not is_replaceable(self.to, is_export):
            raise UserError(f"to={self.to}: holds something else than an export; choose another")
        if self.repository:
            hub.check_repository(self.repository)
        fill = self._file_writer()
        card = self._build_card().render()

        def write_files(folder: Path) -> None:
            fill(folder)
            (folder / "README.md").write_text(card, encoding="utf-8")

        about = {"of": self.source.name, "as": "merged" if self.merged else "peft"}
        note = {**self.source.note, "exported": about}
        write_folder_atomic(self.to, write_files, note, "model" if self.merged else "adapter", is_export)
        told = [f"wrote {self.to}: {format_size(self.to)}", self._serve_command(str(self.to))]
        if self.source.unfinished_note:
            told.insert(1, self.source.unfinished_note)
        if self.repository:
            told.insert(1, "put on the hub: " + hub.push_folder(self.to, self.repository, self.private))
        return told

    def _file_writer(self) -> Callable[[Path], None]:
        """What writes the files."""
        if self.source.is_full_model:
            return lambda folder: copy_model(self.source.folder, folder)
        if self.merged:
            base, adapter = self._base_model, read_adapter(self.source.folder)
            return lambda folder: write_merged(base, adapter, self.dtype or "", folder)

        def copy_adapter(folder: Path) -> None:
            for name in (CONFIG_FILE, WEIGHTS_FILE):
                shutil.copyfile(self.source.folder / name, folder / name)

        return copy_adapter

    @cached_property
    def _base_model(self) -> BaseModel:
        return self.source.load_base(self._given_base)

    def _build_card(self) -> ModelCard:
        title = self.repository or self.to.resolve().name
        return ModelCard(
            self.source, self.merged, self.dtype, title, self._collect_licences(), self._serve_command(title)
        )

    def _collect_licences(self) -> dict[str, str]:
        if self.source.is_full_model:
            return collect_input_licences(self.source)
        try:
            base = find_licence(self._base_model.on_disk())
        except UserError:
            base = find_licence()
        return {"base model": base, **collect_input_licences(self.source)}

    def _serve_command(self, name: str) -> str:
        """The command with which vLLM serves it, under this path or name."""
        if self.merged:
            return f"vllm serve {name}"
        rank = max(shape[2] for shape in read_adapter(self.source.folder).shapes.values())
        most = next((size for size in VLLM_RANKS if size >= rank), None)
        if most is None:
            return (
                f"(vLLM serves adapters up to rank {VLLM_RANKS[-1]}, not {rank}: export it merged)"
            )
        label = Path(name).name
        return (
            f"vllm serve {self.source.base_name or 'BASE'} --enable-lora --max-lora-rank {most} "
            f"--lora-modules {label}={name}"
        )


def is_export(note: dict[str, Any]) -> bool:
    """Whether a folder with this swarm.json was written by an export."""
    return "exported" in note


def format_size(folder: Path) -> str:
    """How large the files are."""
    total = sum(path.stat().st_size for path in folder.iterdir())
    return f"{total / 1e6:.3g} MB"
