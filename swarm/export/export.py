"""One export: what is taken, as what, and where it goes."""

import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from swarm.adapters import CONFIG, VLLM_RANKS, WEIGHTS, read_adapter
from swarm.engine.base import DTYPES, Base
from swarm.errors import UserError
from swarm.export import hub, source
from swarm.export.card import Card
from swarm.export.licences import inputs, licence
from swarm.export.merged import copy_model, write_merged
from swarm.folders import replaceable, write_folder
from swarm.places import as_path

FORMATS = ("peft", "merged")


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
        if format not in FORMATS:
            raise UserError(f"format={format}: must be one of {', '.join(FORMATS)}")
        if dtype is not None and (format != "merged" or dtype not in DTYPES[1:]):
            raise UserError(
                f"dtype={dtype}: with format=merged one of {', '.join(DTYPES[1:])}, else left out"
            )
        if not isinstance(private, bool):
            raise UserError(f"private={private}: must be true or false")
        self.to, self.merged, self.private = as_path(str(to)), format == "merged", private
        self.repository = push_to_hub
        self.source = source.read(given, particle, point)
        if self.source.whole and (dtype or not self.merged):
            raise UserError(
                f"{self.source.folder} is a whole model: export it with format=merged, which "
                "copies it, and without dtype"
            )
        self.dtype = None if self.source.whole else dtype or "bfloat16"
        self._given_base = base

    def write(self) -> list[str]:
        """Write the folder, put it on the hub if that is asked for; gives what to tell the user.

        Raises:
            UserError: Something is missing, or the folder holds something else; nothing is
                half-written then.
        """
        if not replaceable(self.to, is_export):
            raise UserError(f"to={self.to}: holds something else than an export; choose another")
        if self.repository:
            hub.check(self.repository)
        fill = self._fill()
        card = self._card().text()

        def write(folder: Path) -> None:
            fill(folder)
            (folder / "README.md").write_text(card, encoding="utf-8")

        about = {"of": self.source.name, "as": "merged" if self.merged else "peft"}
        note = {**self.source.note, "exported": about}
        write_folder(self.to, write, note, "model" if self.merged else "adapter", is_export)
        told = [f"wrote {self.to}: {size(self.to)}", self._serve(str(self.to))]
        if self.source.unfinished:
            told.insert(1, self.source.unfinished)
        if self.repository:
            told.insert(1, "put on the hub: " + hub.push(self.to, self.repository, self.private))
        return told

    def _fill(self) -> Callable[[Path], None]:
        """What writes the files."""
        if self.source.whole:
            return lambda folder: copy_model(self.source.folder, folder)
        if self.merged:
            base, adapter = self._base, read_adapter(self.source.folder)
            return lambda folder: write_merged(base, adapter, self.dtype or "", folder)

        def copy(folder: Path) -> None:
            for name in (CONFIG, WEIGHTS):
                shutil.copyfile(self.source.folder / name, folder / name)

        return copy

    @cached_property
    def _base(self) -> Base:
        return self.source.base(self._given_base)

    def _card(self) -> Card:
        title = self.repository or self.to.resolve().name
        return Card(
            self.source, self.merged, self.dtype, title, self._licences(), self._serve(title)
        )

    def _licences(self) -> dict[str, str]:
        if self.source.whole:
            return inputs(self.source)
        try:
            base = licence(self._base.on_disk())
        except UserError:
            base = licence()
        return {"base model": base, **inputs(self.source)}

    def _serve(self, name: str) -> str:
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


def size(folder: Path) -> str:
    """How large the files are."""
    total = sum(path.stat().st_size for path in folder.iterdir())
    return f"{total / 1e6:.3g} MB"
