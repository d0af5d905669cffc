"""The tasks that ship without gold answers: what is valued, constant answers, gamed scorers."""

from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from swarm._util.files import conf_folder
from swarm.scorers.short_sentence import score
from swarm.tasks.base import Score
from swarm.tasks.metrics import best_constant_answers, measure


def shipped(name: str) -> Any:
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        task = instantiate(compose("search", ["name=test", f"task={name}"]).task, _convert_="all")
    task.check()
    task.open("cpu")
    return task


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("The soup is hot, not cold.", 1),
        ("The soup is hot.", 1 / 2),
        ("Hot and cold.", 2 / 3),
        ("the soup is hot, not cold", 2 / 3),
        ("hot cold", 1 / 3),
        ("The soup is warm. It is good.", 0),
        ("", 0),
    ],
)
def test_a_sentence_has_its_words_and_a_form(text: str, value: float) -> None:
    assert score("", text, {"words": ["hot", "cold"]}) == pytest.approx(value)


def test_the_classifier_knows_opposites() -> None:
    task = shipped("contrary")
    asked = {"prompt": "The road is wide. Say the contrary.\nAnswer:", "id": 0}
    right = ("The road is narrow.", "narrow", "The opposite of wide is narrow.")
    wrong = ("The road is sweet.", "The road is not wide.", "narrow sweet hot", "", "A long road")
    assert min(task.grade(asked, text) for text in right) > 0.8
    assert max(task.grade(asked, text) for text in wrong) < 0.3 and task.highest == 1


@pytest.mark.parametrize(("name", "limit"), [("contrary", 0.1), ("sentences", 0.1)])
def test_no_constant_answer_is_good(name: str, limit: float) -> None:
    task = shipped(name)
    dev = task.items("dev")
    assert len(dev) >= 80 and len(task.items("test")) >= 200 and task.gold_error
    constants = best_constant_answers(task, dev)
    values = [one.value for one in constants.score_items(task, dev)]
    assert np.mean(values) < limit


def test_texts_of_a_scorer_are_described() -> None:
    task = shipped("sentences")
    same = measure(task, [Score(1.0, "a b", "a b")] * 4)
    other = measure(task, [Score(1.0, text, text) for text in ("a", "a b", "c", "d e f")])
    assert (same.entropy, same.length) == (0, 2) and (other.entropy, other.length) == (2, 7 / 4)
