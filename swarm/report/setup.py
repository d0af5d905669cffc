"""What a search was: its configuration, experts and versions."""

from collections.abc import Iterator, Mapping
from typing import Any

from swarm.errors import UserError
from swarm.report.blocks import ReportBlock, ReportSection, TableBlock, TextBlock
from swarm.report.compared import TestComparison
from swarm.report.folder import RunFolder
from swarm.report.numbers import pluralize
from swarm.report.starts import read_starts
from swarm.secrets import clean

MAX_EXPERTS_NAMED = 12
"""Groups of modules that are listed by name; of more, the first and the last."""


def configuration_section(models: TestComparison) -> ReportSection:
    """The settings, and the digests that make the search the one it is."""
    run = models.run
    own, made = run.experts[: run.own], run.experts[run.own :]
    blocks: list[ReportBlock] = [TextBlock([f"{len(own)} experts: {', '.join(own)}."])]
    if made:
        rows_made = f"{pluralize(len(made), 'more row')}, made by the pool: {', '.join(made)}."
        blocks.append(TextBlock([rows_made]))
    if len(run.groups) > 1:
        named = [*run.groups]
        if len(named) > MAX_EXPERTS_NAMED:
            named = [*named[: MAX_EXPERTS_NAMED - 2], "...", named[-1]]
        blocks.append(TextBlock([f"{len(run.groups)} groups of modules with coefficients of their own: "
                             f"{', '.join(named)}."]))  # fmt: skip
    names = ("seed", "base weights", "pool weights", "task items")
    rows = [[name, str(run.identity[name])] for name in names if name in run.identity]
    rows += [["versions", told] for told in _list_versions(run)]
    blocks.append(TableBlock("What it ran on", ["what", "which (weights and items as digests)"], rows))
    try:
        config = clean(run.config)
    except UserError:
        config = run.identity
    keys = [[key, _format_value(value)] for key, value in flatten_keys(config)]
    table = TableBlock("Configuration", ["key", "value"], keys)
    return ReportSection(
        "setup",
        "Configuration",
        "The same keys, seed, weights and items give the same search; python -m swarm.search takes "
        "the keys as they stand here.",
        blocks,
        {f"All {len(keys)} keys": [table]},
    )


def flatten_keys(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The keys of a configuration, dotted."""
    for name, value in tree.items():
        here = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping) and value:
            yield from flatten_keys(value, here)
        else:
            yield here, value


def _format_value(value: object) -> str:
    """A value as a command line takes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _list_versions(run: RunFolder) -> list[str]:
    """The packages' versions, each different set once; from the log."""
    return list(dict.fromkeys(one.versions for one in read_starts(run) if one.versions))
