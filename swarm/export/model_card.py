"""Model card of an export: what it is made of, its numbers, its use, and how it was made."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

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
from swarm.report.sections import coefficient_table
from swarm.runs.verdict import (
    Verdict,
    format_gain,
    format_measured,
    list_caveats,
    state_verdict,
)

PAPER_LINK = "[Model Swarms](https://arxiv.org/abs/2410.11163)"

ROUTES_NOTE = (
    "Each kind of prompt has one of these adapters, in the folder of its name; no single adapter "
    f"is the result. `{ROUTER_FILE}` assigns a prompt to one by its words. The table "
    "has the mean over the adapted modules."
)

SPACE_NOTES = {
    "factor": "A and B of the adapters were mixed separately (the factor space of the paper).",
    "delta": "The products B A of the adapters were mixed (the delta space).",
    "weights": "All weights of these models were mixed.",
}


def render_card(
    source: ExportSource,
    title: str,
    serve: str,
    command: str,
    merged: bool,
    dtype: str | None,
    gguf_file: str | None,
) -> str:
    """Return the README.md of an export.

    Args:
        source: The result.
        title: Name of the export.
        serve: Command that serves it.
        command: Command that exported it.
        merged: Whether the export is a complete model.
        dtype: Data type of a merged model's weights; `None`: unchanged.
        gguf_file: Name of the GGUF file; `None` for safetensors.
    """
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    versions = source.state.get("versions") or [{"packages": {}}]
    packages = sorted(versions[-1]["packages"].items())
    search = shlex.join(["python", "-m", "swarm.search", *source.arguments])
    card: str = environment.get_template("card.md.j2").render(
        front_matter=_front_matter(source, merged, gguf_file),
        title=title,
        short_name=Path(title).name,
        introduction=_introduction(source, merged, dtype),
        sections=[
            ("Components", _describe_components(source)),
            ("Numbers", _describe_numbers(source, merged, dtype)),
        ],
        base=source.base_name or "BASE",
        serve=serve,
        merged=merged,
        gguf_file=gguf_file,
        routed=bool(source.routes),
        router_file=ROUTER_FILE,
        word_pattern=WORD_PATTERN.pattern,
        search=search if source.arguments else "",
        command=command,
        packages=", ".join(f"{name} {number}" for name, number in packages),
    )
    return card


def _front_matter(source: ExportSource, merged: bool, gguf_file: str | None) -> str:
    """Return the front matter for the hub; a base that is a local folder is omitted."""
    named = source.note.get("models") or [source.base_name]
    bases = [name for name in named if name and is_hub_id(name) and not find_path(name).exists()]
    kind, library = ("merge", "transformers") if merged else ("lora", "peft")
    matter = ({"base_model": bases} if bases else {}) | {
        "library_name": "gguf" if gguf_file else library,
        "pipeline_tag": "text-generation",
        "tags": ["model-swarms", kind, *(["gguf"] if gguf_file else [])],
    }
    text: str = yaml.safe_dump(matter, sort_keys=False, allow_unicode=True)
    return text


def _introduction(source: ExportSource, merged: bool, dtype: str | None) -> str:
    if source.is_full_model:
        what = "A full model, of the architecture of"
    elif source.routes:
        what = f"{len(source.routes)} LoRA adapters for different kinds of prompts, of"
    else:
        what = "A full model, an adapter merged into" if merged else "A LoRA adapter of"
    found = f"{what} {source.base_name or 'an unnamed base model'}"
    if stand_in := source.stand_in:
        found += f" (measured on {stand_in}, not on the hub's weights)"
    task = source.config.get("task", {}).get("name") or source.note.get("task")
    task = f" for the task {task}" if task else ""
    if source.kind == "search":
        found += f", found{task} by a search over combinations of experts, as in {PAPER_LINK}"
    elif source.kind == "finetune":
        found += f", fine-tuned by gradient{task}"
    if merged and not source.is_full_model:
        found += f". The weights are the float32 sum of base and adapter, as {dtype}"
    if note := source.unfinished:
        found += f". {note[0].upper()}{note[1:]}"
    return found


def _describe_components(source: ExportSource) -> str:
    note = source.note
    if start := note.get("tuned_from"):
        return f"{start}, trained further for {note['training']['step']} steps."
    if "coefficients" not in note:
        return ""
    names, groups = note["experts"], note.get("groups", ["all"])
    described = describe_position(names, note["coefficients"], groups)
    values = np.reshape(note["coefficients"], (len(groups), len(names)))
    if source.routes:
        groups, values = route_means(groups, note["coefficients"])
    table = coefficient_table("", names, groups, values)
    parts = [f"{described}.", "\n".join(format_table(table.header, table.rows))]
    parts += [ROUTES_NOTE] if source.routes else []
    parts += filter(None, [SPACE_NOTES.get(note.get("space", ""))])
    if error := note.get("reconstruction_error"):
        parts.append(
            f"The adapter differs from the position that was searched by {error['overall']:.2g} of "
            f"its norm (relative Frobenius error; the worst module: {error['worst']:.2g})."
        )
    return "\n\n".join(parts)


def _describe_numbers(source: ExportSource, merged: bool, dtype: str | None) -> str:
    verdict, rank = source.verdict, source.truncated_rank
    if verdict and source.kind == "finetune":
        lines = format_tuning(verdict, source.state["tuning"])
    elif verdict:
        start = f"best initial expert: {verdict.expert}"
        end = f"before rounding to rank {rank}" if rank else "this one"
        lines = [
            *scores_table(verdict, start, end),
            *domain_lines(verdict, "best initial expert", end),
            *describe_numbers(verdict, source.folder.parent),
        ]
    elif one := source.baseline:
        tested = f": {format_measured(one.test)} on test" if one.test else ""
        lines = [f"The {one.label} of a search, which compared it{tested}."]
    elif source.point:
        lines = _describe_point(source)
    elif (utility := source.note.get("validation_utility")) is not None:
        what = f"Signal ({source.signal})" if source.signal else "Utility"
        lines = [f"{what} {utility:.4f} on dev, where it was chosen; it was not tested."]
    else:
        return "Nothing was measured." if source.kind != "folder" else ""
    if rank:
        lines.append(
            "This is for the position that was searched. The saved adapter, rounded to rank "
            f"{rank}, was not measured."
        )
    if merged and dtype not in (None, "float32"):
        lines.append(
            f"These numbers were measured before the weights were rounded to {dtype}, which can "
            "change answers."
        )
    return "\n".join(_separate_paragraphs(lines))


def _describe_point(source: ExportSource) -> list[str]:
    """Describe a point of a front, with one row per objective."""
    parts = source.point.get("test_parts", {})
    rows = [
        [
            name,
            f"{value:.3f}",
            "{utility:.3f} [{low:.3f}, {high:.3f}] (n = {n})".format(**parts[name])
            if name in parts
            else "not tested",
        ]
        for name, value in source.point["dev"].items()
    ]
    header = ("objective", "dev, where it was chosen", "test")
    return [
        f"Point {source.point['point']} of the front of a search with several objectives.",
        *format_table(header, rows),
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
    """Insert an empty line between sentences and tables; the lines of a table stay together."""
    spread: list[str] = []
    for line in found:
        if spread and spread[-1] and not (line.startswith("|") and spread[-1].startswith("|")):
            spread.append("")
        if line:
            spread.append(line)
    return spread
