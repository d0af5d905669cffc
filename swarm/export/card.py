"""The model card: what an export is made of, what it came to, and how to use it."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from swarm.engine.sources import is_hub_id
from swarm.export.command import build_command
from swarm.export.licences import to_hub_id
from swarm.export.source import ExportSource
from swarm.finetune.comparison import domain_lines, format_metrics, scores_table
from swarm.places import find_path
from swarm.report.text import format_table
from swarm.words import list_caveats, test_conclusion, describe_position

PAPER_LINK = "[Model Swarms](https://arxiv.org/abs/2410.11163)"

SPACE_NOTES = {
    "factor": "A and B of the adapters were mixed separately (the factor space of the paper).",
    "delta": "The products B A of the adapters were mixed (the delta space).",
    "weights": "All weights of these whole models were mixed.",
}


@dataclass(frozen=True)
class ModelCard:
    """What a card is written from.

    Attributes:
        source: The result.
        merged: Whether the export is a whole model.
        dtype: Of a whole model's weights; `None`: as they were.
        title: What the export is called.
        licences: Of the inputs, by what they are: "base model" and each expert.
        serve: The command that serves it.
    """

    source: ExportSource
    merged: bool
    dtype: str | None
    title: str
    licences: dict[str, str]
    serve: str

    def render(self) -> str:
        """The whole README.md."""
        front = yaml.safe_dump(self.front_matter(), sort_keys=False, allow_unicode=True)
        sections = {
            "What it is made of": self._composition_section(),
            "Numbers": self._numbers_section(),
            "Use": self._usage_section(),
            "Made again by": self._command_section(),
            "Licences of what it is made of": self._licences_section(),
        }
        parts = [f"---\n{front}---", f"# {self.title}", self._introduction()]
        parts += [f"## {name}\n\n{text}" for name, text in sections.items() if text]
        return "\n\n".join(parts) + "\n"

    def front_matter(self) -> dict[str, Any]:
        """The front matter that the hub reads; a base that is a folder is not named there."""
        named = self.source.note.get("models") or [self.source.base_name]
        bases = [name for name in named
                 if name and is_hub_id(name) and not find_path(name).exists()]  # fmt: skip
        found: dict[str, Any] = {"base_model": bases} if bases else {}
        known = {to_hub_id(text) for text in self.licences.values()}
        if len(known) == 1 and None not in known:
            found["license"] = known.pop()
        kind = "merge" if self.merged else "lora"
        return found | {
            "library_name": "transformers" if self.merged else "peft",
            "pipeline_tag": "text-generation",
            "tags": ["model-swarms", kind],
        }

    def _introduction(self) -> str:
        what = "A LoRA adapter of" if not self.merged else "A whole model, an adapter merged into"
        if self.source.is_full_model:
            what = "A whole model, of the architecture of"
        found = f"{what} {self.source.base_name or 'a base model that nobody named'}"
        if stand_in := self.source.stand_in:
            found += f" (measured on {stand_in}, not on the hub's weights)"
        task = self.source.config.get("task", {}).get("name") or self.source.note.get("task")
        task = f" for the task {task}" if task else ""
        how = {
            "search": f", found{task} by a search over combinations of experts, as in {PAPER_LINK}.",
            "finetune": f", fine-tuned by gradient{task}.",
            "folder": ".",
        }[self.source.kind]
        rounded = ""
        if self.merged and not self.source.is_full_model:
            rounded = f" The weights are the float32 sum of base and adapter, as {self.dtype}."
        so_far = self.source.unfinished_note
        so_far = f" {so_far[0].upper()}{so_far[1:]}." if so_far else ""
        return found + how + so_far + rounded

    def _composition_section(self) -> str:
        note = self.source.note
        if start := note.get("tuned_from"):
            return f"{start}, trained further for {note['training']['step']} steps."
        if "coefficients" not in note:
            return ""
        names, groups = note["experts"], note.get("groups", ["all"])
        rows = np.reshape(note["coefficients"], (len(groups), len(names)))
        heads = ["expert", "coefficient"] if len(groups) == 1 else ["expert", *groups]
        cells = [[name, *(f"{c:.4f}" for c in rows[:, i])] for i, name in enumerate(names)]
        if len(groups) > len(names):
            heads = ["group", *names]
            cells = [[name, *(f"{c:.4f}" for c in row)]
                     for name, row in zip(groups, rows, strict=True)]  # fmt: skip
        parts = [f"{describe_position(names, note['coefficients'], groups)}.",
                 "\n".join(format_table(heads, cells)),
                 SPACE_NOTES.get(note.get("space", ""), "")]  # fmt: skip
        if error := note.get("reconstruction_error"):
            parts.append(
                f"The adapter is off from what was searched by {error['overall']:.2g} of its norm "
                f"(relative Frobenius error; the worst module: {error['worst']:.2g})."
            )
        return "\n\n".join(part for part in parts if part)

    def _numbers_section(self) -> str:
        metrics, note = self.source.metrics, self.source.note
        if self.source.kind == "finetune" and metrics:
            return "\n".join(_separate_paragraphs([*format_metrics(metrics), *self._unmeasured_notes()]))
        if metrics:
            start = f"best initial expert: {metrics['starting_best_expert']}"
            end = "this one"
            if self.source.truncated_rank:
                end = f"before rounding to rank {self.source.truncated_rank}"
            rows = [*scores_table(metrics, start, end), *domain_lines(metrics, "best initial expert", end)]
            return "\n".join([*rows, "", *_separate_paragraphs([*describe_metrics(metrics), *self._unmeasured_notes()])])
        if point := self.source.point_metrics:
            return "\n".join(_separate_paragraphs([*_describe_point(point), *self._unmeasured_notes()]))
        if (utility := note.get("validation_utility")) is not None:
            what = f"Signal ({self.source.signal})" if self.source.signal else "Utility"
            chosen = f"{what} {utility:.4f} on dev, where it was chosen; it was not tested."
            return "\n".join(_separate_paragraphs([chosen, *self._unmeasured_notes()]))
        return "Nothing was measured." if self.source.kind != "folder" else ""

    def _unmeasured_notes(self) -> list[str]:
        """That what was rounded afterwards has no numbers, and how it gets some."""
        told, dtype = [], []
        if self.source.truncated_rank:
            told.append(
                "This is of the position that was searched. What was saved of it, rounded to rank "
                f"{self.source.truncated_rank}, was not measured."
            )
        rounded = self.merged and self.dtype not in (None, "float32")
        if rounded and self.source.in_float32:
            told.append(f"Numbers are of the float32 adapter; rounding to {self.dtype} can change "
                        "answers.")  # fmt: skip
            dtype = [f"model.dtype={self.dtype}"]
        if not told:
            return []
        made = shlex.split(build_command(self.source.kind, self.source.config)) if self.source.config \
            else ["task=TASK"]  # fmt: skip
        words = [word for word in made if re.match(r"\+*(task|model|engine)[.=]", word)]
        folder = self.title.rpartition("/")[2]
        words = [word for word in words if not (dtype and word.startswith("model.dtype="))]
        words += [*dtype, "candidate=adapter", f"candidate.folder={folder}"]
        return [
            f"{' '.join(told)} What this folder holds is measured by",
            f"```sh\n{shlex.join(['python', '-m', 'swarm.evaluate', *words])}\n```",
        ]

    def _usage_section(self) -> str:
        base = self.source.base_name or "BASE"
        code = (
            f'model = AutoModelForCausalLM.from_pretrained("{self.title}")'
            if self.merged
            else f'base = AutoModelForCausalLM.from_pretrained("{base}")\n'
            f'model = PeftModel.from_pretrained(base, "{self.title}")'
        )
        head = "" if self.merged else "from peft import PeftModel\n"
        head += "from transformers import AutoModelForCausalLM\n\n"
        return f"```python\n{head}{code}\n```\n\nor\n\n```sh\n{self.serve}\n```"

    def _command_section(self) -> str:
        if not self.source.config:
            return ""
        return f"```sh\n{build_command(self.source.kind, self.source.config)}\n```"

    def _licences_section(self) -> str:
        rows = [[name, found] for name, found in self.licences.items()]
        return "\n".join(format_table(("", "licence"), rows)) if rows else ""


def _describe_point(point: Mapping[str, Any]) -> list[str]:
    """A point of a front in numbers, part by part."""
    found = [f"Point {point['point']} of the front of a search with several objectives."]
    told = point.get("test_parts", {})
    rows = [
        [name, f"{value:.3f}", _format_measurement(told[name]) if told else "not tested"]
        for name, value in point["dev"].items()
    ]
    header = ("objective", "dev, where it was chosen", "test")
    found.append("\n" + "\n".join(format_table(header, rows)))
    return [*found, "Brackets: 95 % intervals. A dev number of a front is the highest of many."]


def _format_measurement(one: Mapping[str, Any]) -> str:
    low, high = one["interval"]
    return f"{one['utility']:.3f} [{low:.3f}, {high:.3f}] (n = {one['items']})"


def describe_metrics(metrics: dict[str, Any]) -> list[str]:
    """What may be said of the numbers, a paragraph each."""
    found = ["Brackets: 95 % intervals. The dev number of the best found is the highest of many "
             "and flatters it; test was never searched on."]  # fmt: skip
    told = [test_conclusion(metrics)] if "test_gain" in metrics else ["It was not tested."]
    if "test_gain" in metrics and not (
        metrics["test_gain"] > 0 and metrics["test_gain_p_value"] < 0.05
    ):
        told.append("So it was not shown to be better than the best initial expert.")
    # Of an adapter that was cut afterwards the card says more than that.
    rest = {key: value for key, value in metrics.items() if key != "reconstruction_error"}
    return [*found, " ".join(told), *list_caveats(rest)]


def _separate_paragraphs(found: Sequence[str]) -> list[str]:
    """Lines, with an empty one between any two sentences; a table stays together."""
    spread: list[str] = []
    for line in found:
        spread += ["", line] if spread and not line.startswith("|") else [line]
    return spread
