"""The verdict on a search: its three forms, and what decides."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.runs.verdict import (
    FOUND,
    Compared,
    Start,
    Verdict,
    list_controls,
    read_verdict,
    state_verdict,
)
from swarm.stats.significance import PairedTest
from swarm.tasks.metrics import Measured


def made(end: float, others: dict[str, tuple[float, float]], start: Start | None = None) -> Verdict:
    """The verdict on a best found with a test utility, beside others with (utility, p)."""

    def beside(name: str) -> Compared:
        utility, p = others[name]
        gain = end - utility
        half = abs(gain) * (0.5 if p < 0.05 else 1.5)
        test = Measured(utility, utility - 0.05, utility + 0.05, 450)
        paired = PairedTest(gain, gain - half, gain + half, p, 450)
        label = "best expert (rooms)" if name == "expert" else f"model {name}"
        return Compared(name, label, Measured(0.3, 0.2, 0.4, 80), test, paired)

    found = Compared(
        FOUND, "best found", Measured(0.8, 0.7, 0.9, 80), Measured(end, end - 0.05, end + 0.05, 450)
    )
    alternatives = sorted(map(beside, others), key=lambda one: -others[one.name][0])
    return Verdict(found, "rooms", alternatives, start=start)


def from_start(label: str, iterations: int = 4, ended: str = "done") -> Start:
    return Start(True, label, iterations, ended)


def test_a_verdict_survives_json() -> None:
    verdict = made(0.5, {"expert": (0.3, 1e-6), "base": (0.4, 0.2)}, from_start("soup"))
    assert Verdict.from_dict(json.loads(json.dumps(verdict.to_dict()))) == verdict
    assert read_verdict({"verdict": None}) is None


def test_a_gain_over_the_best_expert_is_none_if_another_model_is_level() -> None:
    others = {"expert": (0.11, 1e-9), "base": (0.04, 1e-9), "routes": (0.716, 0.1)}
    verdict = made(0.684, others)
    assert verdict.strongest is not None and verdict.strongest.name == "routes"
    found = state_verdict(verdict, Path("search/skills"))
    assert (found.kind, found.headline) == ("unclear", "Not distinguishable")
    assert "0.684 on 450 test items" in found.sentence and "0.716" in found.sentence
    assert "-3.2 points, p = 0.1." in found.sentence
    assert "less than about 4.8 points cannot be shown" in found.sentence


def test_worth_it_is_better_than_each_and_names_the_strongest() -> None:
    others = {"expert": (0.27, 1e-9), "recipe": (0.42, 1e-6), "constant": (0.31, 1e-9)}
    found = state_verdict(made(0.59, others), Path("search/mine"))
    assert str(found).startswith("Worth it: the best found has 0.590 on 450 test items")
    assert "the model recipe, the strongest of 3 that need no search" in found.sentence
    assert "0.420: +17 points" in found.sentence


def test_the_strongest_is_one_that_is_not_beaten() -> None:
    """A higher utility that is beaten on its items does not hide a lower one that is not."""
    verdict = made(0.5, {"expert": (0.45, 0.01), "base": (0.44, 0.2)})
    assert verdict.strongest is not None and verdict.strongest.name == "base"
    assert state_verdict(verdict).kind == "unclear"


def test_a_model_that_is_better_does_not_hide_behind_a_higher_one_that_is_not() -> None:
    others = {"expert": (0.3, 1e-6), "recipe": (0.55, 0.2), "soup": (0.54, 0.01)}
    found = state_verdict(made(0.5, others), Path("search/x"))
    assert found.headline == "Not worth it" and "Use the model soup" in found.advice


def test_a_first_iteration_that_beats_all_was_worth_it() -> None:
    """Its mixtures are not among the alternatives that need no search."""
    found = state_verdict(
        made(0.7, {"expert": (0.2, 1e-6)}, start=from_start("best of the first round"))
    )
    assert found.headline == "Worth it" and "the only one compared" in found.sentence


def test_a_search_that_ended_before_it_moved_is_not_judged() -> None:
    found = state_verdict(made(0.3, {"expert": (0.3, 1.0)}, from_start("x", 0, "time limit")))
    assert (found.kind, found.headline) == ("open", "Nothing searched")
    assert "before it moved (time limit)" in found.sentence


def test_not_worth_it_names_what_to_use_and_the_command() -> None:
    verdict = made(0.5, {"expert": (0.3, 1e-6), "recipe": (0.6, 0.001)})
    found = state_verdict(verdict, Path("search/a run"))
    assert "and the model recipe, the strongest of 2 that need no search, 0.600" in str(found)
    assert found.advice == "Use the model recipe, which needs no search."
    command = "python -m swarm.export 'search/a run' baseline=recipe 'to=exported/a run'"
    assert found.kind == "worse" and found.sentence.endswith(command)
    assert "python" not in state_verdict(verdict).sentence
    base = state_verdict(made(0.5, {"expert": (0.3, 1e-6), "base": (0.6, 0.001)}), Path("search/x"))
    assert base.sentence.endswith("Use the base model as it is.")
    none = {"expert": (0.3, 1e-6), "constant": (0.6, 0.001)}
    assert "No model is needed" in state_verdict(made(0.5, none), Path("search/x")).sentence


def test_a_search_that_returns_its_start_was_not_worth_it() -> None:
    verdict = made(0.42, {"expert": (0.41, 0.5)}, start=from_start("best of the first round: soup"))
    found = state_verdict(verdict, Path("search/x"))
    assert found.headline == "Not worth it"
    assert "nothing better than the best of the first round: soup" in found.sentence
    assert "python -m swarm.export search/x to=exported/x" in found.sentence


def test_the_expert_of_each_domain_is_listed_but_does_not_decide() -> None:
    verdict = made(0.59, {"expert": (0.27, 1e-9), "experts": (0.78, 1e-9)})
    assert [one.name for one in verdict.alternatives] == ["experts", "expert"]
    assert state_verdict(verdict).headline == "Worth it"


def test_without_a_test_there_is_no_verdict() -> None:
    whole = made(0.59, {"expert": (0.27, 1e-9)})
    (expert,) = whole.alternatives
    untested = replace(expert, test=None, gain=None)
    found = replace(whole, found=replace(whole.found, test=None), alternatives=[untested])
    statement = state_verdict(found)
    assert (statement.kind, statement.headline) == ("open", "Not tested")
    assert "biased upwards" in statement.sentence and found.strongest is None


@pytest.mark.parametrize("text", ["[]", "{", '{"identity": null}', '{"identity": {}}'])
def test_controls_of_a_gain_are_named_or_how_to_run_them(text: str, tmp_path: Path) -> None:
    gain, run = made(0.59, {"expert": (0.27, 1e-9)}), {"pool.control": None, "task items": "a"}
    run |= {"base weights": "b", "pool weights": "c", "seed": 1, "task.dev_limit": 80}
    (mine := tmp_path / "mine").mkdir()
    (mine / "run.json").write_text(json.dumps({"identity": run}))
    words = ["task=file", "++task.file=a.csv", "optimizer.soups=2", "name=mine"]
    (mine / "command.json").write_text(json.dumps({"arguments": words}))
    (tmp_path / "odd").mkdir()
    for file in ("run.json", "tuning.json"):
        (tmp_path / "odd" / file).write_text(text)
    twins, tuned = list_controls(gain, mine)
    task = "task=file ++task.file=a.csv"
    command = f"swarm.search {task} optimizer.soups=2 pool.control=random name=mine_twins"
    assert twins.startswith("Control not run yet") and command in twins
    assert f"swarm.finetune {task} task.dev_limit=80 budget=" in tuned
    assert "name=mine_lora" in tuned
    other = {**run, "pool.control": "random", "pool weights": "d"}
    for name, file, identity in (
        ("twins", "run.json", other),
        ("seed", "run.json", {**other, "seed": 2}),
        ("lora", "tuning.json", {**run, "start": "the base"}),
        ("expert", "tuning.json", {**run, "start": "amber"}),
        ("items", "tuning.json", {**run, "start": "the base", "task items": "z"}),
    ):
        state = {"identity": identity, "verdict": {"found": {"test": {"utility": 0.47}}}}
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(json.dumps(state))
    assert list_controls(gain, mine) == [
        "Control, random twins of the experts: 0.470 (twins) on test, against 0.590.",
        "Control, a new LoRA alone: 0.470 (lora) on test, against 0.590.",
    ]
    assert not list_controls(made(0.2, {"expert": (0.27, 1e-9)}), mine)
