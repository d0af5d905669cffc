"""Help of the Hydra entries: keys with their defaults and the comments of the yaml files."""

import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from swarm._util.files import conf_folder
from swarm.errors import UserError


def entry_name() -> str:
    """Return the name of the running command, as in `python -m swarm.NAME`."""
    module = Path(sys.argv[0])
    return module.parent.name if module.stem == "__main__" else module.stem


def entry_config() -> Path:
    """Return the configuration file of the current entry, by default that of a search."""
    path = conf_folder() / f"{entry_name()}.yaml"
    is_entry = path.is_file() and "defaults:" in path.read_text(encoding="utf-8")
    return path if is_entry else conf_folder() / "search.yaml"


def list_option_files() -> list[Path]:
    """Return the option files of that entry, in the order of its groups."""
    import yaml

    defaults = yaml.safe_load(entry_config().read_text(encoding="utf-8"))["defaults"]
    groups = [*(name for one in defaults if isinstance(one, dict) for name in one), "scorer"]
    return [path for group in groups for path in sorted((conf_folder() / group).glob("*.yaml"))]


MAIN_KEYS = {
    "search": (
        "task",
        "pool.folder",
        "model",
        "optimizer",
        "name",
        "gpus",
        "budget",
        "minutes",
        "task.dev_limit",
        "dry_run",
    ),
    "evaluate": (
        "task",
        "candidate",
        "pool.folder",
        "model",
        "split",
        "device",
        "out",
        "task.test_limit",
    ),
    "finetune": (
        "task",
        "expert",
        "run",
        "pool.folder",
        "model",
        "name",
        "gpus",
        "steps",
        "rank",
        "rate",
    ),
}
"""Keys that the help of an entry lists first."""

HELP_COLUMN = 34
"""Column of the descriptions in the help; a longer key has its description on the next line."""


def print_help(arguments: Sequence[str]) -> bool:
    """Print the help if `--help`, `-h` or `help=GROUP` is given; return whether it was.

    Read from the yaml files of conf/, whose comments describe each key. Groups chosen by other
    arguments, as in `optimizer=cmaes --help`, show the keys of that option.

    Raises:
        UserError: There is no such group.
    """
    wanted = [word.partition("=")[2] for word in arguments if word.startswith("help=")]
    # Other entries print their own text.
    if entry_name() not in MAIN_KEYS or not (wanted or {"--help", "-h"} & set(arguments)):
        return False
    entry = entry_config()
    chosen = _default_options(entry)
    groups = [*chosen, "scorer"]
    if wanted and wanted[-1] not in groups:
        matches = get_close_matches(wanted[-1], groups, 1)
        suggestion = f"did you mean help={matches[0]}? " if matches else ""
        raise UserError(
            f"help={wanted[-1]}: no such group; {suggestion}allowed: {', '.join(groups)}", 2
        )
    given = dict(word.split("=", 1) for word in arguments if re.fullmatch(r"[a-z_]+=[\w-]+", word))
    for group, option in given.items():
        if group in chosen and (conf_folder() / group / f"{option}.yaml").is_file():
            chosen[group] = option
    if wanted:
        print("\n".join(_format_group_help(wanted[-1], chosen.get(wanted[-1]))))
    else:
        print("\n".join(_format_entry_help(entry, chosen)))
    return True


def _default_options(entry: Path) -> dict[str, str | None]:
    """Return the groups of an entry with their default options."""
    import yaml

    defaults = yaml.safe_load(entry.read_text(encoding="utf-8"))["defaults"]
    pairs = [pair for one in defaults if isinstance(one, dict) for pair in one.items()]
    return {str(group): option for group, option in pairs if not str(group).startswith("override")}


def _format_entry_help(entry: Path, chosen: Mapping[str, str | None]) -> list[str]:
    """Return the lines of `--help`: examples, the main keys, then all keys by group."""
    import yaml

    name = entry.stem
    text = yaml.safe_load(entry.read_text(encoding="utf-8"))["hydra"]["help"]["template"]
    own = {key: one for key, one in _read_keys(entry).items() if not key.startswith("hydra")}
    sections = {group: _option_keys(group, option) for group, option in chosen.items() if option}
    every = {
        group: (str(option), f"help={group} lists its options and keys")
        for group, option in chosen.items()
    }
    for keys in (own, *sections.values()):
        every |= keys
    lines = [text.rstrip(), "", "Keys, set with key=value. The first to know (key=default):"]
    lines += _format_keys({key: every[key] for key in MAIN_KEYS[name] if key in every})
    lines += ["", "Groups, chosen with group=option; help=GROUP lists options and keys of one:"]
    names = {
        group: [one.stem for one in sorted((conf_folder() / group).glob("*.yaml"))]
        for group in chosen
    }
    listed = {
        group: ", ".join(options) if len(options) < 20 else f"{len(options)} options"
        for group, options in names.items()
    }
    lines += _format_keys({group: (one or "none", listed[group]) for group, one in chosen.items()})
    lines += ["", f"{name}:", *_format_keys(own)]
    for group, keys in ((group, keys) for group, keys in sections.items() if keys):
        lines += ["", f"{group}={chosen[group]}:", *_format_keys(keys)]
    flags = "--cfg job --resolve (print the configuration), --multirun or -m (a sweep)"
    return [*lines, "", f"Other flags: {flags}, --shell-completion, --version."]


def _format_group_help(group: str, option: str | None) -> list[str]:
    """Return the lines of help=GROUP: every option, then the keys of the chosen one."""
    paths = sorted((conf_folder() / group).glob("*.yaml"))
    place = "task.scorer" if group == "scorer" else group
    prefix = f"{group}@{place}" if group == "scorer" else group
    lines = [f"{group}: chosen with {prefix}=OPTION, by default {option or 'none'}.", ""]
    options = {f"{prefix}={path.stem}": ("", first_comment(path)) for path in paths}
    lines += _format_keys(options, equals="")
    shown = [option] if option else [path.stem for path in paths if group == "scorer"]
    for one in shown:
        lines += ["", f"Keys of {prefix}={one} (key=default):"]
        lines += _format_keys(_option_keys(group, one, f"{place}."))
    if len(paths) > 1 and option:
        other = next(path.stem for path in paths if path.stem != option)
        lines += ["", f"Keys of another option: {prefix}={other} help={group}"]
    return lines


def first_comment(path: Path) -> str:
    """Return the first comment of a file; Hydra's package directive is not one."""
    lines = path.read_text(encoding="utf-8").splitlines()
    texts = [line.lstrip("# ").strip() for line in lines if line.startswith("#")]
    return next((text for text in texts if not text.startswith("@package")), "")


def _format_keys(keys: Mapping[str, tuple[str, str]], equals: str = "=") -> list[str]:
    """Format keys with their default and description, wrapped to the terminal's width."""
    width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))
    lines = []
    for key, (value, about) in keys.items():
        head = f"  {key}{equals}{value}" if equals else f"  {key}"
        indent = " " * HELP_COLUMN
        wrapped = textwrap.wrap(about, width - HELP_COLUMN) or [""]
        if len(head) < HELP_COLUMN:
            wrapped[0] = head.ljust(HELP_COLUMN) + wrapped[0]
            lines += [wrapped[0].rstrip(), *(indent + line for line in wrapped[1:])]
        else:
            lines += [head, *(indent + line for line in wrapped if line)]
    return lines


def _option_keys(
    group: str, option: str | None, prefix: str | None = None
) -> dict[str, tuple[str, str]]:
    """Return key -> (default, description) of an option, with those it inherits.

    A scorer inside a task is included; a task of a mixture and an optimizer in another are not, as
    their keys are those of their own option.
    """
    import yaml

    path = conf_folder() / group / f"{option}.yaml"
    prefix = f"{group}." if prefix is None else prefix
    found: dict[str, tuple[str, str]] = {}
    if not path.is_file():
        return found
    defaults = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("defaults", [])
    for one in defaults:
        if isinstance(one, str) and one != "_self_":
            found |= _option_keys(group, one, prefix)
        for place, other in one.items() if isinstance(one, dict) else ():
            part, _, package = str(place).removeprefix("override ").lstrip("/").partition("@")
            if part != group and package:
                found |= _option_keys(part, str(other), f"{prefix}{package}.")
    own = _read_keys(path)
    return found | ({f"{prefix}{key}": one for key, one in own.items()})


def _read_keys(path: Path) -> dict[str, tuple[str, str]]:
    """Return key -> (default as written, first line of its comment) of a yaml file, dotted.

    The comment is that on the key's line, else the one above it. Keys of Hydra are left out, and
    keys without a comment that refer to others.
    """
    import yaml

    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    found: dict[str, tuple[str, str]] = {}

    def add_keys(node: yaml.MappingNode, prefix: str) -> None:
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line
            if name.startswith("_") or (not prefix and name in ("defaults", "hydra")):
                continue
            if isinstance(value, yaml.MappingNode) and not value.flow_style:
                add_keys(value, f"{prefix}{name}.")
                continue
            written = text[value.start_mark.index : value.end_mark.index].strip()
            about = _find_comment(lines, line, value.end_mark.line)
            if about or "${" not in written:
                computed = "..." if "${" in written else written or "null"
                found[f"{prefix}{name}"] = (computed, about)

    root = yaml.compose(text)
    if isinstance(root, yaml.MappingNode):
        add_keys(root, "")
    return found


def _find_comment(lines: Sequence[str], first: int, last: int) -> str:
    """Return the comment of a key whose value is in these lines."""
    for number in range(first, min(last, len(lines) - 1) + 1):
        if comment := re.search(r"\s#\s?(.*)$", lines[number]):
            return comment[1].strip()
    above = first
    while above > 1 and lines[above - 1].lstrip().startswith("#"):
        above -= 1
    return lines[above].lstrip("# ").strip() if above < first else ""
