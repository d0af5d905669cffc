"""The table of what each expert has on each kind of items, and its sentences."""

import json
from collections.abc import Sequence
from dataclasses import asdict

import searches

from swarm.runs.overview import Overview, survey_experts
from swarm.tasks.base import Score
from swarm.tasks.exact_match import ExactMatch

KINDS = ("connectivity", "shortest_path")


def overview(shares: Sequence[tuple[float, float]]) -> Overview:
    """Of experts that are right on these shares of each kind of items."""
    task = ExactMatch("nlgraph_mini", str(searches.ROOT / "data" / "nlgraph_mini.json"))
    by_kind = {kind: [i for i in task.items("dev") if i["domain"] == kind][:20] for kind in KINDS}
    items = [item for mine in by_kind.values() for item in mine]
    right = [[n % 20 < 20 * one[n // 20] for n in range(40)] for one in shares]
    experts = {f"expert{k}": [Score(float(one), "x") for one in row] for k, row in enumerate(right)}
    return survey_experts(task, items, experts)


def test_the_table_is_that_counted_by_hand() -> None:
    found = overview([(0.95, 0.0), (0.0, 0.9), (0.0, 0.0)])
    assert found.utilities == [[0.95, 0.0], [0.0, 0.9], [0.0, 0.0]]
    assert (found.overall, found.best_of_each) == ([0.475, 0.45, 0.0], 0.925)
    assert Overview.from_state({"overview": json.loads(json.dumps(asdict(found)))}) == found
    header, rows = found.table(80)
    assert header == ["adapter", *KINDS, "all"]
    assert rows[0][1:3] == ["0.95*", "(0.00)"] and rows[1][1:3] == ["(0.00)", "0.90*"]
    assert [row[0] for row in rows[3:]] == ["constant answer", "items"]
    alone, each, weak = found.sentences()
    assert alone == "Alone, expert0 is best: 0.47 on 40 dev items."
    assert each.startswith("The right adapter for each kind would have at most 0.93, constant")
    assert weak.startswith("expert2 never beats a constant answer: leave it out (pool.experts)")


def test_a_wide_table_is_transposed_and_a_large_one_names_the_best() -> None:
    wide = overview([(0.0, n / 9) for n in range(9)])
    for width in (60, 40):
        header, rows = wide.table(width)
        assert all(
            sum(max(map(len, column)) + 2 for column in zip(header, *rows, strict=True)) - 2 <= size
            for size in [width]
        )
    assert header == ["kind", "bes…pter", "it has", "a constant"]
    assert rows[1][1:3] == ["expert8", "0.90*"]
