"""Model card of an export: what it is made of, its numbers, its use, and how it was made."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from swarm._util.files import find_path
from swarm._util.terminal import format_table
from swarm.engine.base_model import is_hub_id
from swarm.export.source import ExportSource
from swarm.finetune.run import domain_lines, format_tuning, scores_table
from swarm.merging.positions import describe_position, route_means
from swarm.pool.adapter import ROUTER_FILE
from swarm.pool.prompt_router import WORD_PATTERN
from swarm.runs.verdict import (
    Verdict,
    format_gain,
    format_measured,
    list_caveats,
    read_verdict,
    state_verdict,
)

PAPER_LINK = "[Model Swarms](https://arxiv.org/abs/2410.11163)"

ROUTES_NOTE = (
    "Each kind of prompt has one of these adapters, in the folder of its name; no single adapter "
    f"is the result. `{ROUTER_FILE}` assigns a prompt to one by its words. The table "
    "has the mean over the adapted modules."
)

ROUTED_SNIPPET = """\
import json, math, re
{download}from peft import PeftModel
from transformers import AutoModelForCausalLM

folder = {folder}
with open(f"{{folder}}/{file}", encoding="utf-8") as file:
    router = json.load(file)


def choose_adapter(prompt):
    words = set(re.findall(r"{pattern}", prompt.lower()))
    vector = [w * (word in words) for word, w in zip(router["words"], router["weights"])]
    vector.append(not any(vector))
    dots = [sum(x * y for x, y in zip(vector, row)) for row in router["centroids"]]
    near = [dot / math.hypot(*row) for dot, row in zip(dots, router["centroids"])]
    return router["names"][router["routes"][near.index(max(near))]]


prompt = "..."
base = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, f"{{folder}}/{{choose_adapter(prompt)}}")"""
"""Loading of the adapter of a prompt without this package, as `PromptRouter.assign` chooses it."""

SPACE_NOTES = {
    "factor": "A and B of the adapters were mixed separately (the factor space of the paper).",
    "delta": "The products B A of the adapters were mixed (the delta space).",
    "weights": "All weights of these models were mixed.",
}


@dataclass(frozen=True)
class ModelCard:
    """Content of a model card.

    Attributes:
        source: The result.
        merged: Whether the export is a complete model.
        dtype: Data type of a merged model's weights; `None`: unchanged.
        title: Name of the export.
        serve: Command that serves it.
        command: Command that exported it.
        gguf_file: Name of the GGUF file; `None` for safetensors.
    """

    source: ExportSource
    merged: bool
    dtype: str | None
    title: str
    serve: str
    command: str = ""
    gguf_file: str | None = None

    def render(self) -> str:
        """Return the complete README.md."""
        front = yaml.safe_dump(self.front_matter(), sort_keys=False, allow_unicode=True)
        sections = {
            "Components": self._composition_section(),
            "Numbers": self._numbers_section(),
            "Use": self._usage_section(),
            "Reproduce": self._reproduction_section(),
            "Licence": "The licences of the base model and of the components apply.",
        }
        parts = [f"---\n{front}---", f"# {self.title}", self._introduction()]
        parts += [f"## {name}\n\n{text}" for name, text in sections.items() if text]
        return "\n\n".join(parts) + "\n"

    def front_matter(self) -> dict[str, Any]:
        """Return the front matter for the hub; a base that is a local folder is omitted."""
        named = self.source.note.get("models") or [self.source.base_name]
        bases = [
            name for name in named if name and is_hub_id(name) and not find_path(name).exists()
        ]
        kind, library = ("merge", "transformers") if self.merged else ("lora", "peft")
        return ({"base_model": bases} if bases else {}) | {
            "library_name": "gguf" if self.gguf_file else library,
            "pipeline_tag": "text-generation",
            "tags": ["model-swarms", kind, *(["gguf"] if self.gguf_file else [])],
        }

    def _introduction(self) -> str:
        source = self.source
        what = "A LoRA adapter of" if not self.merged else "A full model, an adapter merged into"
        if source.is_full_model:
            what = "A full model, of the architecture of"
        if source.routes:
            what = f"{len(source.routes)} LoRA adapters for different kinds of prompts, of"
        found = f"{what} {source.base_name or 'an unnamed base model'}"
        if stand_in := source.stand_in:
            found += f" (measured on {stand_in}, not on the hub's weights)"
        task = source.config.get("task", {}).get("name") or source.note.get("task")
        task = f" for the task {task}" if task else ""
        search = f", found{task} by a search over combinations of experts, as in {PAPER_LINK}"
        found += {"search": search, "finetune": f", fine-tuned by gradient{task}"}.get(
            source.kind, ""
        )
        if self.merged and not source.is_full_model:
            found += f". The weights are the float32 sum of base and adapter, as {self.dtype}"
        if note := source.unfinished_note:
            found += f". {note[0].upper()}{note[1:]}"
        return f"{found}."

    def _composition_section(self) -> str:
        note = self.source.note
        if start := note.get("tuned_from"):
            return f"{start}, trained further for {note['training']['step']} steps."
        if "coefficients" not in note:
            return ""
        names, groups = note["experts"], note.get("groups", ["all"])
        described = describe_position(names, note["coefficients"], groups)
        rows = np.reshape(note["coefficients"], (len(groups), len(names)))
        if self.source.routes:
            groups, rows = route_means(groups, note["coefficients"])
        heads = ["expert", "coefficient"] if len(groups) == 1 else ["expert", *groups]
        cells = [[name, *(f"{c:.4f}" for c in rows[:, i])] for i, name in enumerate(names)]
        if len(groups) > len(names):
            heads = ["group", *names]
            pairs = zip(groups, rows, strict=True)
            cells = [[name, *(f"{c:.4f}" for c in row)] for name, row in pairs]
        parts = [f"{described}.", "\n".join(format_table(heads, cells))]
        parts += [ROUTES_NOTE] if self.source.routes else []
        parts += filter(None, [SPACE_NOTES.get(note.get("space", ""))])
        if error := note.get("reconstruction_error"):
            parts.append(
                f"The adapter differs from the position that was searched by "
                f"{error['overall']:.2g} of its norm (relative Frobenius error; the worst "
                f"module: {error['worst']:.2g})."
            )
        return "\n\n".join(parts)

    def _numbers_section(self) -> str:
        source, verdict = self.source, self.source.verdict
        if verdict and source.kind == "finetune":
            lines = format_tuning(verdict, source.state["tuning"])
        elif verdict:
            start, end = f"best initial expert: {verdict.expert}", "this one"
            if source.truncated_rank:
                end = f"before rounding to rank {source.truncated_rank}"
            lines = [
                *scores_table(verdict, start, end),
                *domain_lines(verdict, "best initial expert", end),
                "",
                *describe_numbers(verdict, source.folder.parent),
            ]
        elif source.baseline and (whole := read_verdict(source.state)):
            one = next(one for one in whole.alternatives if one.name == source.baseline)
            tested = f": {format_measured(one.test)} on test" if one.test else ""
            lines = [f"The {one.label} of a search, which compared it{tested}."]
        elif point := source.point_metrics:
            lines = _describe_point(point)
        elif (utility := source.note.get("validation_utility")) is not None:
            what = f"Signal ({source.signal})" if source.signal else "Utility"
            lines = [f"{what} {utility:.4f} on dev, where it was chosen; it was not tested."]
        else:
            return "Nothing was measured." if source.kind != "folder" else ""
        if source.truncated_rank:
            lines.append(
                "This is for the position that was searched. The saved adapter, rounded to rank "
                f"{source.truncated_rank}, was not measured."
            )
        if self.merged and self.dtype not in (None, "float32"):
            lines.append(
                f"These numbers were measured before the weights were rounded to {self.dtype}, "
                "which can change answers."
            )
        return "\n".join(_separate_paragraphs(lines))

    def _usage_section(self) -> str:
        base, serve = self.source.base_name or "BASE", f"```sh\n{self.serve}\n```"
        if self.gguf_file and self.merged:
            return f"{serve}\n\nor\n\n```sh\nllama-cli -m {self.gguf_file}\n```"
        if self.gguf_file:
            name = Path(self.title).name
            return (
                f"With {base} as a GGUF file:\n\n{serve}\n\nor, after its name is written into "
                f"Modelfile,\n\n```sh\nollama create {name} -f Modelfile\n```"
            )
        if self.source.routes:
            on_hub = "/" in self.title
            code = ROUTED_SNIPPET.format(
                download="from huggingface_hub import snapshot_download\n" * on_hub,
                folder=f'snapshot_download("{self.title}")' if on_hub else f'"{self.title}"',
                file=ROUTER_FILE,
                pattern=WORD_PATTERN.pattern,
                base=base,
            )
            return (
                f"One adapter for each prompt:\n\n```python\n{code}\n```\n\n"
                "`python -m swarm.serve` chooses it for each request. vLLM serves the adapters "
                f"under their names, and the caller chooses:\n\n{serve}"
            )
        head = "" if self.merged else "from peft import PeftModel\n"
        code = f'model = AutoModelForCausalLM.from_pretrained("{self.title}")'
        if not self.merged:
            code = (
                f'base = AutoModelForCausalLM.from_pretrained("{base}")\n'
                f'model = PeftModel.from_pretrained(base, "{self.title}")'
            )
        code = f"{head}from transformers import AutoModelForCausalLM\n\n{code}"
        return f"```python\n{code}\n```\n\nor\n\n{serve}"

    def _reproduction_section(self) -> str:
        """Return the commands of the search and of the export, and the versions that were used."""
        if not self.source.arguments:
            return ""
        found = shlex.join(["python", "-m", "swarm.search", *self.source.arguments])
        text = f"```sh\n{found}\n{self.command}\n```"
        versions = self.source.state.get("versions") or []
        if packages := versions[-1]["packages"] if versions else {}:
            listed = ", ".join(f"{name} {number}" for name, number in sorted(packages.items()))
            text += f"\n\nRun with {listed}. On other hardware or versions, rounding may differ."
        return text


def _describe_point(point: Mapping[str, Any]) -> list[str]:
    """Describe a point of a front, with one row per objective."""
    parts = point.get("test_parts", {})

    def tested(name: str) -> str:
        if name not in parts:
            return "not tested"
        return "{utility:.3f} [{low:.3f}, {high:.3f}] (n = {n})".format(**parts[name])

    rows = [[name, f"{value:.3f}", tested(name)] for name, value in point["dev"].items()]
    header = ("objective", "dev, where it was chosen", "test")
    return [
        f"Point {point['point']} of the front of a search with several objectives.",
        "\n" + "\n".join(format_table(header, rows)),
        "Brackets: 95 % intervals. Dev scores of a front are maxima of many and so biased upwards.",
    ]


def describe_numbers(verdict: Verdict, folder: Path | None = None) -> list[str]:
    """Describe the numbers of a search without overclaiming, one paragraph each."""
    compared = [
        f"Gain over the {one.label}, {one.test.utility:.3f} on test: {format_gain(verdict, one)}."
        for one in verdict.alternatives
        if one.test
    ]
    return [
        str(state_verdict(verdict, folder)),
        "Brackets: 95 % intervals. The dev score of the best found is the maximum of many and "
        "so biased upwards; test was not used by the search.",
        " ".join(compared),
        # The card has a more detailed note on a truncated adapter.
        *list_caveats(replace(verdict, reconstruction_error=0.0)),
    ]


def _separate_paragraphs(found: Sequence[str]) -> list[str]:
    """Insert an empty line between sentences; the lines of a table stay together."""
    spread: list[str] = []
    for line in found:
        spread += ["", line] if spread and not line.startswith("|") else [line]
    return spread
