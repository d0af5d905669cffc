"""Model card of an export: what it is made of, its numbers, its use, and how it was made."""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from swarm._util.files import find_path
from swarm._util.terminal import format_table
from swarm.engine.base_model import hub_unreachable_reason, is_hub_id
from swarm.errors import UserError
from swarm.export.ranks import describe_cut
from swarm.export.source import ExportSource
from swarm.finetune.run import domain_lines, format_tuning, scores_table
from swarm.merging.positions import describe_position, route_means
from swarm.pool.adapter import ROUTER_FILE
from swarm.report.sections import coefficient_table
from swarm.runs.verdict import (
    Verdict,
    format_gain,
    format_measured,
    list_caveats,
    list_controls,
    state_verdict,
)


def render_card(
    source: ExportSource, base: str | None, title: str, merged: bool, gguf_file: str, **facts: Any
) -> str:
    """Return the README.md of an export.

    Args:
        base: As of `ExportSource.load_base`.
        merged: Whether the export is a complete model.
        gguf_file: Name of the GGUF file; empty for safetensors.
        **facts: What else card.md.j2 shows.
    """
    licence = {} if source.is_full_model else read_licence(source, base)
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    versions = source.state.get("versions") or [{"packages": {}}]
    packages = sorted(versions[-1]["packages"].items())
    search = shlex.join(["python", "-m", "swarm.search", *source.arguments])
    task = source.config.get("task", {}).get("name") or source.note.get("task")
    card: str = environment.get_template("card.md.j2").render(
        source=source,
        note=source.note,
        front_matter=_front_matter(source, title, licence, merged, gguf_file),
        licence=licence.get("license_name") or licence.get("license"),
        title=title,
        short_name=Path(title).name,
        stand_in=source.stand_in,
        task=f" for the task {task}" if task else "",
        components=_describe_components(source),
        numbers="\n".join(_separate_paragraphs(_list_numbers(source))),
        prompt_form=source.note.get("prompt_form"),
        cut="; ".join(describe_cut(source.note["cut"])) if "cut" in source.note else "",
        base=source.base_name or "BASE",
        merged=merged,
        gguf_file=gguf_file,
        router_file=ROUTER_FILE,
        search=search if source.arguments else "",
        packages=", ".join(f"{name} {number}" for name, number in packages),
        **facts,
    )
    return card


def _front_matter(
    source: ExportSource, title: str, licence: dict[str, str], merged: bool, gguf_file: str
) -> str:
    """Return the front matter for the hub; a base that is a local folder is omitted."""
    named = source.note.get("models") or [source.base_name]
    bases = [name for name in named if name and is_hub_id(name) and not find_path(name).exists()]
    kind, library = ("merge", "transformers") if merged else ("lora", "peft")
    matter = ({"base_model": bases} if bases else {}) | {
        "library_name": "gguf" if gguf_file else library,
        "pipeline_tag": "text-generation",
        "tags": ["model-swarms", kind, *(["gguf"] if gguf_file else [])],
        **licence,
    }
    if source.verdict and (test := source.verdict.found.test) and "cut" not in source.note:
        name = source.config.get("task", {}).get("name", "task")
        score = f"score on {test.n} items, 95 % interval {test.low:.3f} to {test.high:.3f}"
        found = {
            "task": {"type": "text-generation"},
            "dataset": {"type": name, "name": name, "split": "test"},
            "metrics": [{"type": "score", "name": score, "value": round(test.utility, 4)}],
        }
        matter["model-index"] = [{"name": title, "results": [found]}]
    text: str = yaml.safe_dump(matter, sort_keys=False, allow_unicode=True)
    return text


def read_licence(source: ExportSource, base: str | None) -> dict[str, str]:
    """Return the licence keys of the base's card, on this machine or the hub; empty if unknown."""
    from huggingface_hub import ModelCard, constants
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    unknown = (UserError, OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError)
    with suppress(*unknown):
        model = source.load_base(base)
        local = Path(str(model.path)) / "README.md"
        named = local if local.is_file() else model.name or str(model.path)
        if named != local and hub_unreachable_reason(constants.ENDPOINT):
            return {}  # else it is tried for 24 s
        card = ModelCard.load(named, ignore_metadata_errors=True).data.to_dict()
        return {k: card[k] for k in ("license", "license_name", "license_link") if card.get(k)}
    return {}


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
    return "\n".join([f"{described}.", "", *format_table(table.header, table.rows)])


def _list_numbers(source: ExportSource) -> list[str]:
    """Return sentences and lines of tables; empty for a folder without numbers."""
    verdict = source.verdict
    if verdict and source.kind == "finetune":
        return format_tuning(verdict, source.state["tuning"])
    if verdict:
        start = f"best expert: {verdict.expert}"
        end = "before the cut" if "cut" in source.note else "this one"
        return [
            *scores_table(verdict, start, end),
            *domain_lines(verdict, "best expert", end),
            *describe_numbers(verdict, source.folder.parent),
        ]
    if one := source.baseline:
        tested = f": {format_measured(one.test)} on test" if one.test else ""
        return [f"The {one.label} of a search, which compared it{tested}."]
    if source.point:
        return _describe_point(source)
    if (utility := source.note.get("validation_utility")) is not None:
        what = f"Signal ({source.signal})" if source.signal else "Utility"
        return [f"{what} {utility:.4f} on dev, where it was chosen; it was not tested."]
    return []


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
        *list_caveats(verdict),
        *(list_controls(verdict, folder) if folder else []),
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
