"""The data sets that make_splits.py knows: where each lies on the hub, and how a row reads."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarm.tasks.multiple_choice import LETTERS

Row = Mapping[str, Any]
Item = dict[str, Any]


def chosen(question: str, texts: Sequence[str], right: Any, **more: Any) -> Item:
    """A multiple-choice item; `right` is a letter or a position, as number or text."""
    letters = LETTERS[: len(texts)]
    answer = str(right)
    if answer.isdecimal() and int(answer) < len(texts):
        answer = letters[int(answer)]
    choices = dict(zip(letters, (text.strip() for text in texts), strict=True))
    return {"question": question.strip(), "choices": choices, "answer": answer, **more}


def mmlu(row: Row, draw: random.Random) -> Item:
    """57 subjects, four choices, the right one by position."""
    return chosen(row["question"], row["choices"], row["answer"], domain=row["subject"])


def gsm8k(row: Row, draw: random.Random) -> Item:
    """The answer is what follows "####" in the solution."""
    _, mark, answer = row["answer"].rpartition("####")
    if not mark:
        raise ValueError('its "answer" has no "####"')
    return {"question": row["question"].strip(), "answer": answer.strip(), "domain": "gsm8k"}


def hellaswag(row: Row, draw: random.Random) -> Item:
    """Four endings of a scene; the domain says whether training had its activity."""
    return chosen(row["ctx"], row["endings"], row["label"], domain=row["split_type"])


def truthfulqa(row: Row, draw: random.Random) -> Item:
    """One right choice (mc1), which comes first in the set: the choices are shuffled."""
    texts, labels = row["mc1_targets"]["choices"], row["mc1_targets"]["labels"]
    if sum(labels) != 1:
        raise ValueError(f'its "mc1_targets" have {sum(labels)} right choices')
    order = draw.sample(range(len(texts)), len(texts))
    return chosen(row["question"], [texts[i] for i in order], order.index(labels.index(1)))


def medqa(row: Row, draw: random.Random) -> Item:
    """Four choices by letter."""
    texts = [row["options"][letter] for letter in "ABCD"]
    return chosen(row["question"], texts, row["answer_idx"])


def medmcqa(row: Row, draw: random.Random) -> Item:
    """Four choices in columns of their own, the right one by position."""
    texts = [row[f"op{letter}"] for letter in "abcd"]
    return chosen(row["question"], texts, row["cop"], id=row["id"], domain=row["subject_name"])


def mmlu_pro(row: Row, draw: random.Random) -> Item:
    """Up to ten choices, the right one by letter."""
    more = {"id": row["question_id"], "domain": row["category"]}
    return chosen(row["question"], row["options"], row["answer"], **more)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set.

    Attributes:
        hub, config, split, revision: Where it lies on the hub.
        columns: Those that `item` reads.
        item: The item of a row; its random numbers are the question's own.
        dev, test: The original's sizes.
        even: Whether dev takes as many items of each domain, as the original's does.
    """

    hub: str
    config: str | None = None
    split: str
    revision: str
    columns: str
    item: Callable[[Row, random.Random], Item]
    dev: int = 200
    test: int = 1000
    even: bool = False


SETS = {
    "mmlu": Source(
        hub="cais/mmlu",
        config="all",
        split="test",
        item=mmlu,
        revision="c30699e8356da336a370243923dbaf21066bb9fe",
        columns="question subject choices answer",
    ),
    "gsm8k": Source(
        hub="openai/gsm8k",
        config="main",
        split="test",
        item=gsm8k,
        revision="cc7b047b6e5bb11b4f1af84efc572db110a51b3c",
        columns="question answer",
    ),
    "hellaswag": Source(
        hub="Rowan/hellaswag",
        split="validation",
        item=hellaswag,
        revision="218ec52e09a7e7462a5400043bb9a69a41d06b76",
        columns="ctx endings label split_type",
    ),
    "truthfulqa": Source(
        hub="truthfulqa/truthful_qa",
        config="multiple_choice",
        split="validation",
        revision="741b8276f2d1982aa3d5b832d3ee81ed3b896490",
        item=truthfulqa,
        columns="question mc1_targets",
        test=617,
    ),
    "medqa": Source(
        hub="GBaker/MedQA-USMLE-4-options",
        split="test",
        item=medqa,
        revision="0fb93dd23a7339b6dcd27e241cb9b5eca62d4d18",
        columns="question options answer_idx",
    ),
    "medmcqa": Source(
        hub="openlifescienceai/medmcqa",
        split="validation",
        item=medmcqa,
        revision="91c6572c454088bf71b679ad90aa8dffcd0d5868",
        columns="id question opa opb opc opd cop subject_name",
    ),
    "mmlu_pro": Source(
        hub="TIGER-Lab/MMLU-Pro",
        split="test",
        item=mmlu_pro,
        dev=70,
        even=True,
        revision="b189ec765aa7ed75c8acfea42df31fdae71f97be",
        columns="question_id question options answer category",
    ),
}
