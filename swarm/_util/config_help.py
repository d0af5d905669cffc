"""Help of the Hydra commands: keys with their defaults and the comments of the yaml files."""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from swarm._util.files import conf_folder
from swarm._util.terminal import suggest
from swarm.errors import UserError

MAIN_KEYS = {
    "search": "task task.dev_limit task.test_limit pool.folder pool.experts pool.routes model "
    "model.path model.dtype optimizer optimizer.particles optimizer.max_iterations racing "
    "experiment name folder gpus seed budget minutes test confirm ensemble baselines tracker "
    "dry_run",
    "evaluate": "task task.test_limit candidate pool.folder model model.path split device out",
    "finetune": "task task.dev_limit expert pool.folder model model.path name folder gpus seed "
    "test steps batch rate rank holdout",
}
"""Keys that the help of a command lists; help=GROUP lists the others."""

HELP_COLUMN = 34
"""Column of the descriptions in the help; a longer key has its description on the next line."""


class KeyHelp(NamedTuple):
    """Default of a key as it is written, "..." if it refers to other keys, and its comment."""

    default: str
    about: str


def entry_name() -> str:
    """Return the name of the running command, as in `python -m swarm.NAME`."""
    # A file's path, or a module's name.
    words = sys.argv[0].removesuffix(".py").removesuffix("__main__").replace("/", ".").strip(".")
    return words.rpartition(".")[2]


def entry_config() -> Path:
    """Return the configuration file of the current command, by default that of a search."""
    name = entry_name()
    return conf_folder() / f"{name if name in MAIN_KEYS else 'search'}.yaml"


def default_options() -> dict[str, str | None]:
    """Return the groups of the current command with their default options."""
    import yaml

    defaults = yaml.safe_load(entry_config().read_text(encoding="utf-8"))["defaults"]
    pairs = [pair for one in defaults if isinstance(one, dict) for pair in one.items()]
    return {str(group): option for group, option in pairs if not str(group).startswith("override")}


def option_file(group: str, option: str | None) -> Path:
    """Return the file of a group's option, which may not exist."""
    return conf_folder() / group / f"{option}.yaml"


def list_options(group: str) -> list[str]:
    """Return the options of a group, sorted."""
    return sorted(path.stem for path in (conf_folder() / group).glob("*.yaml"))


def first_comment(path: Path) -> str:
    """Return the first comment of a file; Hydra's package directive is not one."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    texts = [line.lstrip("# ").strip() for line in lines if line.startswith("#")]
    return next((text for text in texts if not text.startswith("@package")), "")


def print_help(arguments: Sequence[str]) -> bool:
    """Print the help if `--help`, `-h` or `help=GROUP` is given; return whether it was.

    Read from the yaml files of conf/, whose comments describe each key. Groups chosen by other
    arguments, as in `optimizer=cmaes --help`, show the keys of that option.

    Raises:
        UserError: There is no such group.
    """
    name = entry_name()
    wanted = [word.partition("=")[2] for word in arguments if word.startswith("help=")]
    # Other commands print their own text.
    if name not in MAIN_KEYS or not (wanted or {"--help", "-h"} & set(arguments)):
        return False
    chosen = default_options()
    given = dict(word.split("=", 1) for word in arguments if re.fullmatch(r"[a-z_]+=[\w-]+", word))
    chosen |= {g: o for g, o in given.items() if g in chosen and option_file(g, o).is_file()}
    groups = [name, *chosen, "scorer"]
    own = {key: one for key, one in read_keys(entry_config()) if not key.startswith("hydra")}
    if not wanted:
        print("\n".join(_format_entry_help(name, chosen, own)))
    elif wanted[-1] == name:
        print(f"{name}: all keys that belong to no group.\n")
        print("\n".join(_format_keys(own)))
    elif wanted[-1] in groups:
        print("\n".join(_format_group_help(wanted[-1], chosen.get(wanted[-1]))))
    else:
        meant = suggest(wanted[-1], groups, "help=")
        allowed = ", ".join(groups)
        raise UserError(f"help={wanted[-1]}: no such group; {meant}allowed: {allowed}", 2)
    return True


def _format_entry_help(
    name: str, chosen: Mapping[str, str | None], own: Mapping[str, KeyHelp]
) -> list[str]:
    """Return the lines of `--help`: examples, the main keys in a line each, and the groups."""
    import yaml

    text = yaml.safe_load(entry_config().read_text(encoding="utf-8"))["hydra"]["help"]["template"]
    every: dict[str, KeyHelp] = {}
    for group, option in chosen.items():
        options = list_options(group)
        about = f"one of {', '.join(options)}"
        if len(options) >= 20:
            about = first_comment(option_file(group, option)) or f"{len(options)} options"
        every[group] = KeyHelp(str(option or "none"), about)
        every |= _option_keys(group, option, f"{group}.")
    every |= own
    keys = {key: every[key] for key in MAIN_KEYS[name].split() if key in every}
    return [
        text.rstrip(),
        "",
        "Keys, set with key=value (key=default):",
        *_format_keys(keys, one_line=True),
        "",
        f"help=GROUP lists all keys and options of: {', '.join([name, *chosen, 'scorer'])}.",
        "Other flags: --cfg job --resolve (print the configuration), --multirun or -m, --version.",
    ]


def _format_group_help(group: str, option: str | None) -> list[str]:
    """Return the lines of help=GROUP: every option, then the keys of the chosen one."""
    place = "task.scorer" if group == "scorer" else group
    prefix = f"{group}@{place}" if group == "scorer" else group
    names = list_options(group)
    about = {f"{prefix}={n}": KeyHelp("", first_comment(option_file(group, n))) for n in names}
    lines = [f"{group}: chosen with {prefix}=OPTION, by default {option or 'none'}.", ""]
    lines += _format_keys(about, equals="")
    for one in [option] if option else names if group == "scorer" else []:
        lines += ["", f"Keys of {prefix}={one} (key=default):"]
        lines += _format_keys(_option_keys(group, one, f"{place}."))
    if option and (others := [name for name in names if name != option]):
        lines += ["", f"Keys of another option: {prefix}={others[0]} help={group}"]
    return lines


def _format_keys(
    keys: Mapping[str, KeyHelp], equals: str = "=", one_line: bool = False
) -> list[str]:
    """Format keys with default and description, wrapped, or shortened, to the terminal's width."""
    width = max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))
    lines = []
    for key, (value, about) in keys.items():
        head = f"  {key}{equals}{value}"
        room = width - max(HELP_COLUMN, len(head) + 2 if one_line else 0)
        texts = textwrap.wrap(about, room)
        if one_line:
            texts = [textwrap.shorten(about, room, placeholder=" ...")]
        if one_line or len(head) < HELP_COLUMN - 1:
            head = f"{head.ljust(HELP_COLUMN - 2)}  {texts.pop(0) if texts else ''}".rstrip()
        lines += [head, *(" " * HELP_COLUMN + text for text in texts)]
    return lines


def _option_keys(group: str, option: str | None, prefix: str) -> dict[str, KeyHelp]:
    """Return the keys of an option, with those it inherits and those of a scorer inside a task.

    A task of a mixture and an optimizer in another are not included: their keys are those of their
    own option.
    """
    import yaml

    path = option_file(group, option)
    if not path.is_file():
        return {}
    found: dict[str, KeyHelp] = {}
    for one in (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("defaults", []):
        if isinstance(one, str) and one != "_self_":
            found |= _option_keys(group, one, prefix)
        for place, other in one.items() if isinstance(one, dict) else ():
            part, _, package = str(place).removeprefix("override ").lstrip("/").partition("@")
            if part != group and package:
                found |= _option_keys(part, str(other), f"{prefix}{package}.")
    return found | {f"{prefix}{key}": one for key, one in read_keys(path)}


def read_keys(path: Path) -> Iterator[tuple[str, KeyHelp]]:
    """Yield each dotted key of a yaml file, with its default and comment.

    The comment is that on the key's line, else the one above it. Keys of Hydra are left out, and
    keys without a comment that refer to others.
    """
    import yaml

    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()

    def read(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, KeyHelp]]:
        for key, value in node.value:
            name, first = str(key.value), key.start_mark.line
            if name.startswith("_") or (not prefix and name in ("defaults", "hydra")):
                continue
            if isinstance(value, yaml.MappingNode) and not value.flow_style:
                yield from read(value, f"{prefix}{name}.")
                continue
            written = text[value.start_mark.index : value.end_mark.index].strip()
            beside = (
                re.search(r"\s#\s?(.*)$", one) for one in lines[first : value.end_mark.line + 1]
            )
            comment = next(filter(None, beside), None)
            above = first  # the line at which a comment above the key begins
            while above > 1 and lines[above - 1].lstrip().startswith("#"):
                above -= 1
            about = comment[1] if comment else lines[above].lstrip("# ") if above < first else ""
            if about or "${" not in written:
                default = "..." if "${" in written else written or "null"
                yield f"{prefix}{name}", KeyHelp(default, about.strip())

    root = yaml.compose(text)
    if isinstance(root, yaml.MappingNode):
        yield from read(root, "")
