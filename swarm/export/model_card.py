"""Model card of an export: its composition, its metrics, its use, and its inputs' licences.

Also rebuilds the command line of a configuration by comparing it with the defaults.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from swarm._util.files import conf_folder, find_path
from swarm._util.secrets import clean
from swarm._util.terminal import format_table
from swarm.engine.base_model import is_hub_id
from swarm.errors import UserError
from swarm.export.gguf_writer import QUANTIZATIONS
from swarm.export.source import CONFIG_DIR_OPTION, ExportSource, read_source
from swarm.finetune.run import FRESH_LABEL, domain_lines, format_tuning, scores_table
from swarm.merging.positions import describe_position, route_means
from swarm.pool.adapter import ROUTER_FILE
from swarm.pool.extra_rows import load_elites
from swarm.pool.prompt_router import WORD_PATTERN
from swarm.runs.verdict import (
    Verdict,
    format_gain,
    format_measured,
    list_caveats,
    read_verdict,
    state_verdict,
)

UNQUOTED_TEXT = re.compile(r"(?!(?:true|false|null|inf|nan)$)[a-z_/.][\w/.@-]*", re.IGNORECASE)
"""Texts that Hydra parses unquoted."""


def build_command(entry: str, config: Mapping[str, Any]) -> str:
    """Return `python -m swarm.ENTRY ...` with the options and keys that differ from the defaults.

    Args:
        entry: "search" or "finetune".
        config: A complete configuration as plain values; secrets are removed.
    """
    config = clean(config)
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        default = compose(entry, ["name=''"], return_hydra_config=True).hydra.runtime.choices
        options = {
            group: _nearest_option(group, config[group])
            for group in default
            if isinstance(config.get(group), Mapping)
        }
        words = [
            f"{group}={option}"
            for group, option in options.items()
            if option != default[group] or group == "task"
        ]
        # Top-level keys first, as nested keys refer to them.
        for part in ({k: v for k, v in config.items() if not isinstance(v, Mapping)}, config):
            known = _compose_flat(entry, words)
            words += [
                f"{'' if key in known else '++'}{key}={_format_value(value)}"
                for key, value in _flatten(part).items()
                if key not in known or known[key] != value
            ]
    return shlex.join(["python", "-m", f"swarm.{entry}", *words])


def _nearest_option(group: str, part: Mapping[str, Any]) -> str:
    """Return the option of a group from which the fewest keys differ."""
    options = {path.stem: path for path in sorted((conf_folder() / group).glob("*.yaml"))}
    if part.get("name") in options:
        return str(part["name"])

    def count_differences(name: str) -> int:
        written = _flatten(OmegaConf.to_container(OmegaConf.load(options[name])))  # type: ignore[arg-type]
        pairs = [(written.get(key), value) for key, value in _flatten(part).items()]
        # A key that an option leaves null is meant to be set, and a reference can have any value.
        return sum(
            1 + (one is not None) for one, value in pairs if one != value and "${" not in str(one)
        )

    return min(options, key=count_differences)


def _group_words(arguments: Sequence[str], group: str) -> list[str]:
    """Return the arguments that choose a group's option or set its keys."""
    return [word for word in arguments if re.match(rf"\+*{group}[.=]", word)]


def _own_option(arguments: Sequence[str], group: str) -> list[str]:
    """Return a group's arguments if its option is from the user's own folder; else none."""
    words = _group_words(arguments, group)
    chosen = [word.partition("=")[2] for word in words if word.startswith(f"{group}=")]
    own = bool(chosen) and not (conf_folder() / group / f"{chosen[-1]}.yaml").is_file()
    return words if own else []


def _compose_flat(entry: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the configuration of a command line, with dotted keys."""
    config = compose(entry, overrides=["name=''", *words])
    return _flatten(OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]


def _flatten(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Flatten to dotted keys; lists and empty mappings are not flattened."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        deep = isinstance(value, Mapping) and value
        found |= _flatten(value, f"{path}{name}.") if deep else {f"{path}{name}": value}
    return found


def _format_value(value: Any) -> str:
    """Format a value for Hydra's command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(_format_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_format_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, str) and not UNQUOTED_TEXT.fullmatch(value):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return str(value)


UNKNOWN_LICENCE = "unknown"

LICENCE_IDS = {
    "afl-3.0",
    "agpl-3.0",
    "apache-2.0",
    "artistic-2.0",
    "bigcode-openrail-m",
    "bigscience-bloom-rail-1.0",
    "bigscience-openrail-m",
    "bsd-2-clause",
    "bsd-3-clause",
    "bsd-3-clause-clear",
    "bsl-1.0",
    "cc-by-2.0",
    "cc-by-3.0",
    "cc-by-4.0",
    "cc-by-nc-2.0",
    "cc-by-nc-3.0",
    "cc-by-nc-4.0",
    "cc-by-nc-nd-3.0",
    "cc-by-nc-nd-4.0",
    "cc-by-nc-sa-2.0",
    "cc-by-nc-sa-3.0",
    "cc-by-nc-sa-4.0",
    "cc-by-nd-4.0",
    "cc-by-sa-3.0",
    "cc-by-sa-4.0",
    "cc0-1.0",
    "cdla-permissive-1.0",
    "cdla-permissive-2.0",
    "cdla-sharing-1.0",
    "creativeml-openrail-m",
    "ecl-2.0",
    "epl-2.0",
    "eupl-1.2",
    "gemma",
    "gpl-2.0",
    "gpl-3.0",
    "isc",
    "lgpl-2.1",
    "lgpl-3.0",
    "llama2",
    "llama3",
    "llama3.1",
    "llama3.2",
    "llama3.3",
    "llama4",
    "mit",
    "mpl-2.0",
    "ms-pl",
    "odbl",
    "odc-by",
    "openrail",
    "openrail++",
    "unlicense",
    "wtfpl",
    "zlib",
}
"""Licence identifiers of a card's front matter (huggingface.co/docs/hub/repositories-licenses)."""

LICENCE_FIRST_LINES = {
    r"apache( license)?,?( version)?( 2(\.0)?)?": "apache-2.0",
    r"(the )?mit license( \(mit\))?": "mit",
    r"(the )?bsd[ -]2[ -]clause license": "bsd-2-clause",
    r"(the )?bsd[ -]3[ -]clause license": "bsd-3-clause",
    r"(creative commons )?attribution 4\.0 international( license)?": "cc-by-4.0",
    r"(meta )?llama (2|3|3\.1|3\.2|3\.3|4) community license agreement": r"llama\2",
    r"gemma terms of use": "gemma",
}
"""Patterns of licences' first lines or names, with the hub's identifiers."""

DERIVED_ROW_NAME = re.compile(r"(?!(base|noise_\d+|elite_\d+)$).+")
"""Names of rows that a pool derives from all its experts."""


def find_licence(*folders: Path | None) -> str:
    """Return the first folder's licence: from its card, or the first line of LICENSE."""
    for folder in folders:
        if folder and (found := _licence_from_card(folder) or _licence_from_file(folder)):
            return found
    return UNKNOWN_LICENCE


def to_hub_id(text: str) -> str | None:
    """Return the hub's identifier of a licence; `None` if its name or first line is unknown."""
    plain = re.sub(r"\s+", " ", text.strip().lower())
    if plain.replace(" ", "-") in LICENCE_IDS:
        return plain.replace(" ", "-")
    known = ((re.fullmatch(line, plain), named) for line, named in LICENCE_FIRST_LINES.items())
    return next((match.expand(named) for match, named in known if match), None)


def collect_input_licences(source: ExportSource) -> dict[str, str]:
    """Return the licences of the adapters or models that a result depends on, by name.

    Of the rows that a pool adds, base and noise have no licence; a recipe depends on all experts of
    the folder, and an elite on the inputs of the run that found it.
    """
    note = source.note
    if start := note.get("tuned_from"):
        return {} if start == FRESH_LABEL else {start: _expert_licence(source, start)}
    if "coefficients" not in note:
        return {"model" if source.is_full_model else "adapter": find_licence(source.folder)}
    names = note["experts"]
    own_names = names[: source.state.get("own", len(names))]
    used = [
        name for index, name in enumerate(names) if any(note["coefficients"][index :: len(names)])
    ]
    merged = (
        own_names
        if any(DERIVED_ROW_NAME.fullmatch(name) for name in used if name not in own_names)
        else []
    )
    found = {name: _expert_licence(source, name) for name in own_names if name in (*used, *merged)}
    for name in used:
        if name not in own_names and name.startswith("elite_"):
            for part, text in _elite_licences(source, own_names, name).items():
                found[part if found.get(part, text) == text else f"{part}, in {name}"] = text
    return found


def _expert_licence(source: ExportSource, name: str) -> str:
    folder = source.find_expert_folder(name)
    return find_licence(folder, folder and folder.parent)


def _elite_licences(source: ExportSource, own_names: list[str], name: str) -> dict[str, str]:
    pool = source.config.get("pool", {})
    try:
        run = find_path(pool.get("elites") or "")
        elites = load_elites(run, pool.get("elite_count", 3), own_names)
        particle = next(one.folder.parent for one in elites if one.name == name)
        number = int(particle.name.removeprefix("particle_"))
        return collect_input_licences(read_source(str(particle.parent), number))
    except (UserError, StopIteration):
        return {name: UNKNOWN_LICENCE}


def _licence_from_card(folder: Path) -> str:
    """Return the licence in the front matter of README.md."""
    import yaml

    path = folder / "README.md"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    if not text.startswith("---\n"):
        return ""
    try:
        front = yaml.safe_load(text[4:].partition("\n---")[0])
    except yaml.YAMLError:
        return ""
    found = front if isinstance(front, dict) else {}
    named = found.get("license_name") if found.get("license") == "other" else found.get("license")
    return str(named or found.get("license") or "")


def _licence_from_file(folder: Path) -> str:
    for path in sorted(folder.glob("LICENSE*")):
        if path.is_file():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            return next((line.strip() for line in lines if line.strip()), "")
    return ""


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
        licences: Licences of the inputs by name: "base model" and each expert.
        serve: Command that serves it.
        gguf_file: Name of the GGUF file; `None` for safetensors.
    """

    source: ExportSource
    merged: bool
    dtype: str | None
    title: str
    licences: dict[str, str]
    serve: str
    gguf_file: str | None = None

    def render(self) -> str:
        """Return the complete README.md."""
        front = yaml.safe_dump(self.front_matter(), sort_keys=False, allow_unicode=True)
        sections = {
            "Components": self._composition_section(),
            "Numbers": self._numbers_section(),
            "Use": self._usage_section(),
            "Reproduce": self._reproduction_section(),
            "Licences of the components": self._licences_section(),
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
        found: dict[str, Any] = {"base_model": bases} if bases else {}
        known = {to_hub_id(text) for text in self.licences.values()}
        if len(known) == 1 and None not in known:
            found["license"] = known.pop()
        kind = "merge" if self.merged else "lora"
        library = "transformers" if self.merged else "peft"
        return found | {
            "library_name": "gguf" if self.gguf_file else library,
            "pipeline_tag": "text-generation",
            "tags": ["model-swarms", kind, *(["gguf"] if self.gguf_file else [])],
        }

    def _introduction(self) -> str:
        what = "A LoRA adapter of" if not self.merged else "A full model, an adapter merged into"
        if self.source.is_full_model:
            what = "A full model, of the architecture of"
        if self.source.routes:
            what = f"{len(self.source.routes)} LoRA adapters for different kinds of prompts, of"
        found = f"{what} {self.source.base_name or 'a base model that nobody named'}"
        if stand_in := self.source.stand_in:
            found += f" (measured on {stand_in}, not on the hub's weights)"
        task = self.source.config.get("task", {}).get("name") or self.source.note.get("task")
        task = f" for the task {task}" if task else ""
        how = {
            "search": f", found{task} by a search over combinations of experts, as in "
            f"{PAPER_LINK}.",
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
        described = describe_position(names, note["coefficients"], groups)
        rows = np.reshape(note["coefficients"], (len(groups), len(names)))
        if self.source.routes:
            groups, rows = route_means(groups, note["coefficients"])
        heads = ["expert", "coefficient"] if len(groups) == 1 else ["expert", *groups]
        cells = [[name, *(f"{c:.4f}" for c in rows[:, i])] for i, name in enumerate(names)]
        if len(groups) > len(names):
            heads = ["group", *names]
            cells = [
                [name, *(f"{c:.4f}" for c in row)] for name, row in zip(groups, rows, strict=True)
            ]
        parts = [
            f"{described}.",
            "\n".join(format_table(heads, cells)),
            ROUTES_NOTE * bool(self.source.routes),
            SPACE_NOTES.get(note.get("space", ""), ""),
        ]
        if error := note.get("reconstruction_error"):
            parts.append(
                f"The adapter differs from the position that was searched by "
                f"{error['overall']:.2g} of its norm (relative Frobenius error; the worst "
                f"module: {error['worst']:.2g})."
            )
        return "\n\n".join(part for part in parts if part)

    def _numbers_section(self) -> str:
        verdict, note = self.source.verdict, self.source.note
        if self.source.kind == "finetune" and verdict:
            lines = format_tuning(verdict, self.source.state["tuning"])
            return "\n".join(_separate_paragraphs([*lines, *self._notes_on_numbers()]))
        if verdict:
            start = f"best initial expert: {verdict.expert}"
            end = "this one"
            if self.source.truncated_rank:
                end = f"before rounding to rank {self.source.truncated_rank}"
            rows = [
                *scores_table(verdict, start, end),
                *domain_lines(verdict, "best initial expert", end),
            ]
            return "\n".join(
                [
                    *rows,
                    "",
                    *_separate_paragraphs(
                        [*describe_numbers(verdict, self._run_folder()), *self._notes_on_numbers()]
                    ),
                ]
            )
        if name := self.source.baseline:
            whole = read_verdict(self.source.state)
            one = next(one for one in whole.alternatives if one.name == name) if whole else None
            if one and one.test:
                tested = format_measured(one.test)
                return f"The {one.label} of a search, which compared it: {tested} on test."
        if point := self.source.point_metrics:
            return "\n".join(
                _separate_paragraphs([*_describe_point(point), *self._notes_on_numbers()])
            )
        if (utility := note.get("validation_utility")) is not None:
            what = f"Signal ({self.source.signal})" if self.source.signal else "Utility"
            chosen = f"{what} {utility:.4f} on dev, where it was chosen; it was not tested."
            return "\n".join(_separate_paragraphs([chosen, *self._notes_on_numbers()]))
        return "Nothing was measured." if self.source.kind != "folder" else ""

    def _run_folder(self) -> Path | None:
        """Return the folder of the search whose best found is exported."""
        return self.source.folder.parent if self.source.kind == "search" else None

    def _notes_on_numbers(self) -> list[str]:
        """Return notes on items that were dropped or truncated, and on unmeasured rounding."""
        return self._unmeasured_notes()

    def _unmeasured_notes(self) -> list[str]:
        """Return notes on unmeasured rounding, with the command that measures it."""
        notes, dtype = [], []
        if self.source.truncated_rank:
            notes.append(
                "This is for the position that was searched. The saved adapter, rounded to "
                f"rank {self.source.truncated_rank}, was not measured."
            )
        rounded = self.merged and self.dtype not in (None, "float32")
        if rounded and self.source.in_float32:
            notes.append(
                f"Numbers are for the float32 adapter; rounding to {self.dtype} can change answers."
            )
            dtype = [f"model.dtype={self.dtype}"]
        if not notes:
            return []
        if self.gguf_file:  # no engine of this toolkit reads it
            return [" ".join(notes)]
        made = (
            shlex.split(build_command(self.source.kind, self.source.config))
            if self.source.config
            else ["task=TASK"]
        )
        words = []
        for group in ("task", "model", "engine"):
            words += _own_option(self.source.arguments, group) or _group_words(made, group)
        if folders := [w for w in self.source.arguments if w.startswith(CONFIG_DIR_OPTION)]:
            words = [*folders, *words]
        folder = self.title.rpartition("/")[2]
        words = [word for word in words if not (dtype and word.startswith("model.dtype="))]
        words += [*dtype, "candidate=adapter", f"candidate.folder={folder}"]
        return [
            f"{' '.join(notes)} The content of this folder is measured by",
            f"```sh\n{shlex.join(['python', '-m', 'swarm.evaluate', *words])}\n```",
        ]

    def _usage_section(self) -> str:
        base = self.source.base_name or "BASE"
        if self.gguf_file and self.merged:
            code = f"llama-cli -m {self.gguf_file}"
            return f"```sh\n{self.serve}\n```\n\nor\n\n```sh\n{code}\n```"
        if self.gguf_file:
            return (
                f"With {base} as a GGUF file:\n\n```sh\n{self.serve}\n```\n\n"
                "or, after its name is written into Modelfile,\n\n"
                f"```sh\nollama create {Path(self.title).name} -f Modelfile\n```"
            )
        if self.source.routes:
            return self._routed_usage(base)
        code = (
            f'model = AutoModelForCausalLM.from_pretrained("{self.title}")'
            if self.merged
            else f'base = AutoModelForCausalLM.from_pretrained("{base}")\n'
            f'model = PeftModel.from_pretrained(base, "{self.title}")'
        )
        head = "" if self.merged else "from peft import PeftModel\n"
        head += "from transformers import AutoModelForCausalLM\n\n"
        return f"```python\n{head}{code}\n```\n\nor\n\n```sh\n{self.serve}\n```"

    def _routed_usage(self, base: str) -> str:
        """Return the use of an export with an adapter for each kind of prompt."""
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
            "`python -m swarm.serve` chooses it for each request. vLLM serves the adapters under "
            f"their names, and the caller chooses:\n\n```sh\n{self.serve}\n```"
        )

    def _reproduction_section(self) -> str:
        """Return the commands of the run and of the export, with the versions that were used."""
        if not self.source.config:
            return ""
        export = ["python", "-m", "swarm.export", f"search/{self.source.name}"]
        export.append(f"to={self.title.rpartition('/')[2]}")
        as_file = "gguf" if self.merged else "gguf_lora"
        kind = as_file if self.gguf_file else "merged" if self.merged else "peft"
        export += [f"format={kind}"] if kind != "peft" else []
        if self.gguf_file and self.dtype in QUANTIZATIONS:
            export.append(f"quantize={self.dtype}")
        elif kind == "merged" and self.dtype not in (None, "bfloat16"):
            export.append(f"dtype={self.dtype}")
        for key in ("particle", "point", "baseline"):
            if (number := getattr(self.source, key)) is not None:
                export.append(f"{key}={number}")
        if self.source.arguments:
            found = shlex.join(["python", "-m", "swarm.search", *self.source.arguments])
        else:
            found = build_command(self.source.kind, self.source.config)
        text = f"```sh\n{found}\n{shlex.join(export)}\n```"
        versions = self.source.state.get("versions") or []
        packages = versions[-1]["packages"] if versions else {}
        if packages:
            listed = ", ".join(f"{name} {number}" for name, number in sorted(packages.items()))
            text += f"\n\nRun with {listed}. On other hardware or versions, rounding may differ."
        return text

    def _licences_section(self) -> str:
        rows = [[name, found] for name, found in self.licences.items()]
        return "\n".join(format_table(("", "licence"), rows)) if rows else ""


def _describe_point(point: Mapping[str, Any]) -> list[str]:
    """Describe a point of a front, with one row per objective."""
    found = [f"Point {point['point']} of the front of a search with several objectives."]
    parts = point.get("test_parts", {})
    rows = [
        [name, f"{value:.3f}", _format_measurement(parts[name]) if parts else "not tested"]
        for name, value in point["dev"].items()
    ]
    header = ("objective", "dev, where it was chosen", "test")
    found.append("\n" + "\n".join(format_table(header, rows)))
    return [
        *found,
        "Brackets: 95 % intervals. Dev scores of a front are maxima of many and so biased upwards.",
    ]


def _format_measurement(one: Mapping[str, Any]) -> str:
    return f"{one['utility']:.3f} [{one['low']:.3f}, {one['high']:.3f}] (n = {one['n']})"


def describe_numbers(verdict: Verdict, folder: Path | None = None) -> list[str]:
    """Describe the numbers without overclaiming, one paragraph each."""
    found = [
        "Brackets: 95 % intervals. The dev score of the best found is the maximum of many and "
        "so biased upwards; test was not used by the search."
    ]
    # For a truncated adapter the card has a more detailed note.
    rest = replace(verdict, reconstruction_error=0.0)
    compared = [
        f"Gain over the {one.label}, {one.test.utility:.3f} on test: {format_gain(verdict, one)}."
        for one in verdict.alternatives
        if one.test
    ]
    return [str(state_verdict(verdict, folder)), *found, " ".join(compared), *list_caveats(rest)]


def _separate_paragraphs(found: Sequence[str]) -> list[str]:
    """Insert an empty line between sentences; the lines of a table stay together."""
    spread: list[str] = []
    for line in found:
        spread += ["", line] if spread and not line.startswith("|") else [line]
    return spread
