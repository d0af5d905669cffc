"""Model of the form for a new search: its options, and the command-line arguments it yields."""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache

from swarm._util.files import conf_folder
from swarm.errors import UserError
from swarm.ui.state import AppState

CONFIG_GROUPS = ("task", "optimizer", "pool", "model", "engine", "tracker")
"""Configuration groups with a field in the form."""

NUMBER_FIELDS = {
    "optimizer.max_iterations": "Iterations",
    "optimizer.particles": "Particles",
    "seed": "Seed",
    "budget": "Budget, dev prompts",
    "task.dev_limit": "Dev items",
    "task.test_limit": "Test items",
}
"""Keys with a field in the form, and their labels."""

RESERVED_KEYS = ("name", "folder", "dry_run", *CONFIG_GROUPS)
"""Keys that the free lines may not set."""

OVERRIDE_LINE = re.compile(r"(\+{1,2}|~)?([A-Za-z_][\w./@-]*)(=.*)?", re.DOTALL)


def group_options(group: str) -> dict[str, str]:
    """Return the options of a group with their descriptions, the first comment of each file."""
    return {
        path.stem: _first_comment(path.read_text(encoding="utf-8"))
        for path in sorted((conf_folder() / group).glob("*.yaml"))
    }


def _first_comment(text: str) -> str:
    first = text.split("\n", 1)[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""


@cache
def default_options() -> dict[str, str]:
    """Return the default option of each group of a search."""
    import yaml

    tree = yaml.safe_load((conf_folder() / "search.yaml").read_text(encoding="utf-8"))
    named = [one for one in tree["defaults"] if isinstance(one, dict)]
    return {group: str(option) for one in named for group, option in one.items()}


def default_run_name(task: str) -> str:
    """Return a free run name, in the form of the command line's default."""
    return f"{task}_{datetime.now():%Y-%m-%d_%H-%M-%S}"


def initial_form(home: AppState) -> tuple[dict[str, str], str]:
    """Return the initial form: options by group, and lines for the application's arguments."""
    chosen = {group: default_options()[group] for group in CONFIG_GROUPS}
    lines = []
    if home.pool != "initial_experts":
        lines.append(f"pool.folder={home.pool}")
    if home.base in group_options("model"):
        chosen["model"] = home.base or ""
    elif home.base:
        chosen["model"] = "local"
        lines.append(f"model.path={home.base}")
    if home.device and home.device.startswith("cuda"):
        lines.append(f"gpus=[{home.device.partition(':')[2] or 0}]")
    return chosen, "\n".join(lines)


def build_arguments(
    home: AppState, name: str, chosen: Mapping[str, str], numbers: Mapping[str, str], lines: str
) -> list[str]:
    """Build the arguments of `python -m swarm.search`.

    Args:
        name: Name of the run.
        chosen: Option of each group; default options are left out, except the task.
        numbers: Number fields as typed; empty ones are left out.
        lines: Further `key=value` settings, one per line.

    Raises:
        UserError: A field or a line is invalid.
    """
    name = name.strip()
    run = home.run_path(name)
    if not re.fullmatch(r"[\w.+-]+", name):
        raise UserError(f"Name: {name!r:.80} may contain letters, digits and . _ + - only")
    if run.exists():
        raise UserError(
            f"Name: the run {name} already exists; open it to resume it, or choose another name"
        )
    arguments = [
        f"{group}={option}"
        for group, option in chosen.items()
        if group == "task" or option != default_options().get(group)
    ]
    for key, typed in numbers.items():
        text = typed.strip()
        if text and not re.fullmatch(r"\d{1,12}", text):
            raise UserError(f"{NUMBER_FIELDS[key]}: {text!r:.40} is not an integer")
        if text:
            arguments.append(f"{key}={int(text)}")
    return [*arguments, *_parse_lines(lines), f"name={name}"]


def _parse_lines(lines: str) -> Sequence[str]:
    """Parse the lines, skipping empty ones.

    Raises:
        UserError: A line is not key=value, or its key has a field.
    """
    found = []
    for number, line in enumerate(lines.split("\n"), 1):
        if not (text := line.strip()):
            continue
        parts = OVERRIDE_LINE.fullmatch(text)
        if not parts or (parts[3] is None and parts[1] != "~"):
            raise UserError(f"Further keys, line {number}: {text!r:.60} is not a key=value")
        key = parts[2]
        if key in RESERVED_KEYS or key.startswith("hydra"):
            has = "has a field above" if key in (*CONFIG_GROUPS, "name") else "cannot be set here"
            raise UserError(f"Further keys, line {number}: {key} {has}")
        found.append(text)
    return found
