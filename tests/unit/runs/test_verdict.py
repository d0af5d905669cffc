"""The verdict on a search: its three forms, and what decides."""

import json
from pathlib import Path
from typing import Any

import pytest

from swarm.runs.verdict import find_tuned, judge_search, list_alternatives


def made(
    end: float, others: dict[str, tuple[float, float]], start: str = "", **more: Any
) -> dict[str, Any]:
    """Final metrics of a best found with a test utility, beside others with (utility, p)."""

    def beside(name: str) -> dict[str, Any]:
        utility, p = others[name]
        gain = end - utility
        half = abs(gain) * (0.5 if p < 0.05 else 1.5)
        return {
            "name": name,
            "label": f"model {name}",
            "test": {"utility": utility, "interval": [utility - 0.05, utility + 0.05]},
            "gain": gain,
            "gain_interval": [gain - half, gain + half],
            "p_value": p,
        }

    expert = beside("expert")
    constants = {}
    if "constant" in others:
        one = beside("constant")
        constants = {**one, "by_domain": {"answers": {"roads": "No"}, "test": one["test"]}}
        constants["by_domain"]["dev"] = one["test"]
    return {
        "in_points": True,
        "starting_best_expert": "rooms",
        "starting_best_validation_utility": 0.3,
        "starting_best_validation_interval": [0.2, 0.4],
        "ending_best_validation_utility": 0.8,
        "ending_best_validation_items": 80,
        "starting_best_single_test_accuracy": others["expert"][0],
        "starting_best_single_test_interval": expert["test"]["interval"],
        "ending_best_single_test_accuracy": end,
        "ending_best_single_test_interval": [end - 0.05, end + 0.05],
        "ending_best_single_test_items": 450,
        "test_gain": expert["gain"],
        "test_gain_interval": expert["gain_interval"],
        "test_gain_p_value": expert["p_value"],
        "baselines": [beside(name) for name in others if name not in ("expert", "constant")],
        "constant_answers": constants,
        "start": {"whole": bool(start), "label": start, "routes": [], "iterations": 4},
        **more,
    }


def test_a_gain_over_the_best_expert_is_none_if_another_model_is_level() -> None:
    others = {"expert": (0.11, 1e-9), "base": (0.04, 1e-9), "routes": (0.716, 0.1)}
    found = judge_search(made(0.684, others), Path("search/skills"))
    assert (found.kind, found.headline) == ("unclear", "Not distinguishable")
    assert found.strongest is not None and found.strongest.name == "routes"
    assert "0.684 on 450 test items" in found.sentence and "0.716" in found.sentence
    assert "-3.2 points [-8, +1.6], p = 0.1" in found.sentence
    assert "less than about 4.8 points cannot be shown" in found.sentence


def test_worth_it_is_better_than_each_and_names_the_strongest() -> None:
    others = {"expert": (0.27, 1e-9), "recipe": (0.42, 1e-6), "constant": (0.31, 1e-9)}
    found = judge_search(made(0.59, others), Path("search/mine"))
    assert str(found).startswith("Worth it: the best found has 0.590 on 450 test items")
    assert "the model recipe, the strongest of 3 compared that need no search" in found.sentence
    assert "0.420: a gain of +17 points" in found.sentence


def test_the_strongest_is_one_that_is_not_beaten() -> None:
    """A higher utility that is beaten on its items does not hide a lower one that is not."""
    found = judge_search(made(0.5, {"expert": (0.45, 0.01), "base": (0.44, 0.2)}))
    assert found.kind == "unclear" and found.strongest is not None
    assert found.strongest.name == "base"


def test_a_model_that_is_better_does_not_hide_behind_a_higher_one_that_is_not() -> None:
    others = {"expert": (0.3, 1e-6), "recipe": (0.55, 0.2), "soup": (0.54, 0.01)}
    found = judge_search(made(0.5, others), Path("search/x"))
    assert found.headline == "Not worth it" and "use the model soup: 0.540" in found.sentence


def test_a_first_iteration_that_beats_all_was_worth_it() -> None:
    """Its mixtures are not among the alternatives that need no search."""
    found = judge_search(made(0.7, {"expert": (0.2, 1e-6)}, start="best of the first iteration"))
    assert found.headline == "Worth it" and "the only one compared" in found.sentence


def test_a_search_that_ended_before_it_moved_is_not_judged() -> None:
    start = {"whole": True, "label": "x", "routes": [], "iterations": 0, "ended": "time limit"}
    found = judge_search({**made(0.3, {"expert": (0.3, 1.0)}), "start": start})
    assert (found.kind, found.headline) == ("open", "Nothing searched")
    assert "before it moved (time limit)" in found.sentence


def test_not_worth_it_names_what_to_use_and_the_command() -> None:
    metrics = made(0.5, {"expert": (0.3, 1e-6), "recipe": (0.6, 0.001)})
    found = judge_search(metrics, Path("search/a run"))
    assert str(found).startswith("Not worth it: use the model recipe: 0.600 on 450 test items")
    command = "python -m swarm.export 'search/a run' baseline=recipe to='exported/a run'"
    assert found.kind == "worse" and found.sentence.endswith(command)
    assert "python" not in judge_search(metrics).sentence
    base = judge_search(made(0.5, {"expert": (0.3, 1e-6), "base": (0.6, 0.001)}), Path("search/x"))
    assert base.sentence.endswith("Use the base model as it is.")
    none = {"expert": (0.3, 1e-6), "constant": (0.6, 0.001)}
    assert "No model is needed" in judge_search(made(0.5, none), Path("search/x")).sentence


def test_a_search_that_returns_its_start_was_not_worth_it() -> None:
    metrics = made(0.42, {"expert": (0.41, 0.5)}, start="best of the first iteration: soup")
    found = judge_search(metrics, Path("search/x"))
    assert found.headline == "Not worth it"
    assert "nothing better than the best of the first iteration: soup" in found.sentence
    assert "python -m swarm.export search/x to=exported/x" in found.sentence


def test_the_expert_of_each_domain_is_listed_but_does_not_decide() -> None:
    metrics = made(0.59, {"expert": (0.27, 1e-9), "experts": (0.78, 1e-9)})
    assert [one.name for one in list_alternatives(metrics)] == ["experts", "expert"]
    assert judge_search(metrics).headline == "Worth it"


def test_without_a_test_there_is_no_verdict() -> None:
    metrics = made(0.59, {"expert": (0.27, 1e-9)})
    del metrics["test_gain"]
    found = judge_search(metrics)
    assert (found.kind, found.headline) == ("open", "Not tested")
    assert "biased upwards" in found.sentence and list_alternatives(metrics) == []


@pytest.mark.parametrize("text", ["[]", "{", '{"metrics": null}', '{"metrics": {"searched": {}}}'])
def test_fine_tuning_on_the_same_items_is_in_the_sentence(text: str, tmp_path: Path) -> None:
    for name, run, same in (
        ("tuned", "mine", True),
        ("other", "theirs", True),
        ("more", "mine", False),
    ):
        searched = {"run": run, "same_items": same}
        metrics = {"searched": searched, "ending_best_single_test_accuracy": 0.47}
        (tmp_path / name).mkdir()
        (tmp_path / name / "tuning.json").write_text(json.dumps({"metrics": metrics}))
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "tuning.json").write_text(text)
    assert find_tuned(tmp_path / "mine") == [("tuned", 0.47)]
    found = judge_search(made(0.59, {"expert": (0.27, 1e-9)}), tmp_path / "mine")
    assert "; fine-tuning on the same items (tuned) has 0.470." in found.sentence
