"""What a search was: its configuration, experts and versions."""

from collections.abc import Iterator, Mapping
from typing import Any

from swarm.errors import UserError
from swarm.report.blocks import Block, Section, Table, Words
from swarm.report.compared import Compared
from swarm.report.folder import RunFolder
from swarm.report.numbers import counted
from swarm.report.starts import starts
from swarm.secrets import clean

NAMED = 12
"""Groups of modules that are listed by name; of more, the first and the last."""


def configuration(models: Compared) -> Section:
    """The settings, and the digests that make the search the one it is."""
    run = models.run
    own, made = run.experts[: run.own], run.experts[run.own :]
    blocks: list[Block] = [Words([f"{len(own)} experts: {', '.join(own)}."])]
    if made:
        rows_made = f"{counted(len(made), 'more row')}, made by the pool: {', '.join(made)}."
        blocks.append(Words([rows_made]))
    if len(run.groups) > 1:
        named = [*run.groups]
        if len(named) > NAMED:
            named = [*named[: NAMED - 2], "...", named[-1]]
        blocks.append(Words([f"{len(run.groups)} groups of modules with coefficients of their own: "
                             f"{', '.join(named)}."]))  # fmt: skip
    names = ("seed", "base weights", "pool weights", "task items")
    rows = [[name, str(run.identity[name])] for name in names if name in run.identity]
    rows += [["versions", told] for told in _versions(run)]
    blocks.append(Table("What it ran on", ["what", "which (weights and items as digests)"], rows))
    try:
        config = clean(run.config)
    except UserError:
        config = run.identity
    keys = [[key, _told(value)] for key, value in flat(config)]
    table = Table("Configuration", ["key", "value"], keys)
    return Section(
        "setup",
        "Configuration",
        "The same keys, seed, weights and items give the same search; python -m swarm.search takes "
        "the keys as they stand here.",
        blocks,
        {f"All {len(keys)} keys": [table]},
    )


def flat(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a configuration, dotted."""
    for name, value in tree.items():
        here = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping) and value:
            yield from flat(value, here)
        else:
            yield here, value


def _told(value: object) -> str:
    """A value as a command line takes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _versions(run: RunFolder) -> list[str]:
    """The packages' versions, each different set once; from the log."""
    return list(dict.fromkeys(one.versions for one in starts(run) if one.versions))
