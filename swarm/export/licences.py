"""The licence of a model or an adapter, as far as its folder says."""

import re
from pathlib import Path

from swarm.errors import UserError
from swarm.export.source import ExportSource, read_source
from swarm.finetune.adapter import FRESH_LABEL
from swarm.pool.elites import EliteExperts

UNKNOWN_LICENCE = "unknown"

LICENCE_IDS = {
    "afl-3.0", "agpl-3.0", "apache-2.0", "artistic-2.0", "bigcode-openrail-m",
    "bigscience-bloom-rail-1.0", "bigscience-openrail-m", "bsd-2-clause", "bsd-3-clause",
    "bsd-3-clause-clear", "bsl-1.0", "cc-by-2.0", "cc-by-3.0", "cc-by-4.0", "cc-by-nc-2.0",
    "cc-by-nc-3.0", "cc-by-nc-4.0", "cc-by-nc-nd-3.0", "cc-by-nc-nd-4.0", "cc-by-nc-sa-2.0",
    "cc-by-nc-sa-3.0", "cc-by-nc-sa-4.0", "cc-by-nd-4.0", "cc-by-sa-3.0", "cc-by-sa-4.0",
    "cc0-1.0", "cdla-permissive-1.0", "cdla-permissive-2.0", "cdla-sharing-1.0",
    "creativeml-openrail-m", "ecl-2.0", "epl-2.0", "eupl-1.2", "gemma", "gpl-2.0", "gpl-3.0",
    "isc", "lgpl-2.1", "lgpl-3.0", "llama2", "llama3", "llama3.1", "llama3.2", "llama3.3",
    "llama4", "mit", "mpl-2.0", "ms-pl", "odbl", "odc-by", "openrail", "openrail++", "unlicense",
    "wtfpl", "zlib",
}  # fmt: skip
"""What a card's front matter may call a licence (huggingface.co/docs/hub/repositories-licenses)."""

LICENCE_FIRST_LINES = {
    r"apache( license)?,?( version)?( 2(\.0)?)?": "apache-2.0",
    r"(the )?mit license( \(mit\))?": "mit",
    r"(the )?bsd[ -]2[ -]clause license": "bsd-2-clause",
    r"(the )?bsd[ -]3[ -]clause license": "bsd-3-clause",
    r"(creative commons )?attribution 4\.0 international( license)?": "cc-by-4.0",
    r"(meta )?llama (2|3|3\.1|3\.2|3\.3|4) community license agreement": r"llama\2",
    r"gemma terms of use": "gemma",
}
"""What licences begin with, or are called, as the hub calls them."""

DERIVED_ROW_NAME = re.compile(r"(?!(base|noise_\d+|elite_\d+)$).+")
"""The names of those rows that a pool makes of all its experts."""


def find_licence(*folders: Path | None) -> str:
    """What the first folder that says something says: its card, or LICENSE in its first line."""
    for folder in folders:
        if folder and (found := _licence_from_card(folder) or _licence_from_file(folder)):
            return found
    return UNKNOWN_LICENCE


def to_hub_id(text: str) -> str | None:
    """A licence as the hub calls it; `None` where it knows none of this name or first line."""
    plain = re.sub(r"\s+", " ", text.strip().lower())
    if plain.replace(" ", "-") in LICENCE_IDS:
        return plain.replace(" ", "-")
    known = ((re.fullmatch(line, plain), named) for line, named in LICENCE_FIRST_LINES.items())
    return next((match.expand(named) for match, named in known if match), None)


def collect_input_licences(source: ExportSource) -> dict[str, str]:
    """The licences of the adapters or models that a result is made of, by their names.

    Of the rows that a pool makes itself, base and noise are nobody's; a recipe is made of all
    experts of the folder, and an elite of what the run that found it made it of.
    """
    note = source.note
    if start := note.get("tuned_from"):
        return {} if start == FRESH_LABEL else {start: _expert_licence(source, start)}
    if "coefficients" not in note:
        return {"model" if source.is_full_model else "adapter": find_licence(source.folder)}
    names = note["experts"]
    own = names[: source.state.get("own", len(names))]
    used = [name for place, name in enumerate(names)
            if any(note["coefficients"][place :: len(names)])]  # fmt: skip
    merged = own if any(DERIVED_ROW_NAME.fullmatch(name) for name in used if name not in own) else []
    found = {name: _expert_licence(source, name) for name in own if name in (*used, *merged)}
    for name in used:
        if name not in own and name.startswith("elite_"):
            for part, text in _elite_licences(source, own, name).items():
                found[part if found.get(part, text) == text else f"{part}, in {name}"] = text
    return found


def _expert_licence(source: ExportSource, name: str) -> str:
    folder = source.find_expert_folder(name)
    return find_licence(folder, folder and folder.parent)


def _elite_licences(source: ExportSource, own: list[str], name: str) -> dict[str, str]:
    pool = source.config.get("pool", {})
    try:
        elites = EliteExperts(pool.get("elites"), pool.get("elite_count", 3)).load_adapters(own)
        particle = next(one.folder.parent for one in elites if one.name == name)
        number = int(particle.name.removeprefix("particle_"))
        return collect_input_licences(read_source(str(particle.parent), number))
    except (UserError, StopIteration):
        return {name: UNKNOWN_LICENCE}


def _licence_from_card(folder: Path) -> str:
    """The licence in the front matter of README.md."""
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
