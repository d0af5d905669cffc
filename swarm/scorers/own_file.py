"""A task from a file as people have it: its columns decide which task reads the answers."""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from swarm.errors import UserError
from swarm.scorers.rules import F1
from swarm.tasks import parsing
from swarm.tasks.base import SPLITS
from swarm.tasks.dataset import DataFiles, DataTask, InMemoryItems, Row, divide_rows, read_rows
from swarm.tasks.exact_match import ExactMatch
from swarm.tasks.free_text import FreeText
from swarm.tasks.multiple_choice import LETTERS, MultipleChoice

QUESTIONS = ("question", "prompt", "instruction", "input", "query", "problem", "ctx", "text")
ANSWERS = (
    "answer completion output response solution target label gold answerkey answeridx correctanswer"
).split()
CHOICES = ("choices", "options", "endings")
TURNS = ("messages", "conversations", "conversation")
DOMAINS = ("domain", "category", "subject", "topic", "kind")
"""Names of columns, in lower case without other characters than letters; the first one counts."""

LONG_ANSWER = 200
"""Characters from which on an answer, like one of several lines, is a text to be resembled."""


def read_task(
    file: DataFiles | None,
    name: str,
    chat: bool | Literal["auto"] = "auto",
    max_new_tokens: int | Literal["auto"] = "auto",
    **settings: Any,
) -> DataTask:
    """Return the task of a file: its columns and answers decide on class and settings.

    - Choices: `MultipleChoice`.
    - Answers of several lines, or of more than `LONG_ANSWER` characters, in more than a tenth of
      the items: `FreeText`, scored by the words that an answer shares with the gold answer.
    - Numbers, yes or no: `ExactMatch` with the parser "anchored".
    - Anything else: `ExactMatch` with the parser "whole".

    Args:
        file: See `swarm.tasks.dataset.read_rows`.
        name: The task's name.
        chat: As of the task; "auto" is decided by a search on its experts.
        max_new_tokens: "auto" follows the longest answer.
        settings: Further ones of the class.

    Returns:
        The task, with what was understood in `about`.

    Raises:
        UserError: The file cannot be read or has no known columns; the message names those found.
    """
    if file is None:
        raise UserError("task.file: name your file, as in task=items.jsonl")
    given = read_rows(file)
    columns, convert = _find_columns(given)
    ids = [row.value.get("id") for row in given]
    unique = {type(one) for one in ids} <= {int, str} and len({*map(str, ids)}) == len(ids)
    named = [{"id": row.value["id"] if unique else row.place, **convert(row)} for row in given]
    converted = [row._replace(value=item) for row, item in zip(given, named, strict=True)]
    rows = divide_rows(converted, ())
    by_split = {split: [row.value for row in rows if row.split == split] for split in SPLITS}
    items = [row.value for row in rows]
    golds = [str(item.get("answer", "")) for item in items]
    kinds = {parsing.answer_kind(gold) for gold in golds}
    long = sum("\n" in gold.strip() or len(gold) > LONG_ANSWER for gold in golds)
    kind: Callable[..., DataTask] = ExactMatch
    room, how = 2, "the complete line"
    if any("choices" in item for item in items):
        kind, golds, room, how = MultipleChoice, [""], 10, "a choice"
    elif 10 * long > len(golds):
        kind, room, how = FreeText, 8, "words shared with the answer"
        settings = {"scorer": F1(lines="all"), "template": "{question}", **settings}
        settings = {"reference": "answer", **settings}
    elif "phrase" not in kinds:
        room, how = 8, "the number, yes or no"
    else:
        settings = {"parser": "whole", **settings}
    if max_new_tokens == "auto":
        max_new_tokens = room + max(estimate_tokens(f" {gold}") for gold in golds)
    data = InMemoryItems(by_split, rows[0].path)
    task = kind(name, data, chat=chat, max_new_tokens=max_new_tokens, **settings)
    limits = {"dev": task.dev_limit, "test": task.test_limit}
    counts = []
    for split, mine in by_split.items():
        used = min(len(mine), limits[split] or len(mine))
        counts.append(f"{used} {split}" + f" of {len(mine)}" * (used < len(mine)))
    dev, test = ({item["question"] for item in by_split[split]} for split in SPLITS)
    both = len(dev & test)
    if unused := len(given) - len(rows):
        counts.append(f"{unused} of train not used")
    shared = f"; {both} question{'s' * (both > 1)} in both" if both else ""
    counted = f"at most {task.max_new_tokens} tokens"  # type: ignore[attr-defined]
    task.about = (
        f"{len(given)} items: {columns}; {', '.join(counts)}{shared}; what counts: {how}, {counted}"
    )
    return task


def estimate_tokens(text: str) -> int:
    """Return a number of tokens that hardly any tokenizer exceeds for a text.

    Three letters are a token, and so is each other byte but a blank before a letter.
    """
    return len(re.findall(rb"[a-zA-Z]{1,3}|[^a-zA-Z\s]|\s(?![a-zA-Z])", text.encode()))


def _find_columns(rows: Sequence[Row]) -> tuple[str, Callable[[Row], dict[str, Any]]]:
    """Return in words which columns the rows have, and the conversion of a row to an item.

    Raises:
        UserError: Question or answer is missing.
    """
    if not rows:
        raise UserError("task.file: has no items")
    names = dict.fromkeys(name for row in rows for name in row.value if name is not None)
    known: dict[str, str] = {}
    for one in names:
        known.setdefault(re.sub(r"[^a-z]", "", str(one).lower()), one)

    def first(wanted: Sequence[str]) -> str | None:
        return next((known[name] for name in wanted if name in known), None)

    domain = first(DOMAINS)
    added = f", by {domain}" if domain else ""

    def item(row: Row, question: str, answer: Any) -> dict[str, Any]:
        shown = None if domain is None else row.value.get(domain)
        found = {"question": question, "answer": answer}
        return found if shown is None else {**found, "domain": str(shown)}

    question, answer, turns = first(QUESTIONS), first(ANSWERS), first(TURNS)
    if turns and not (question and answer):

        def from_turns(row: Row) -> dict[str, Any]:
            return item(row, *split_turns(row, row.value.get(turns)))

        return f"{turns} -> the last assistant turn{added}", from_turns
    if question is None or answer is None or question == answer:
        missing = "question" if question is None else "answer"
        raise UserError(
            f"{rows[0].path}: no column of the {missing}s among {', '.join(map(str, names))}; "
            f'rename yours to "{missing}", or write a yaml (docs/tasks.md)'
        )
    more = known.get("input") if question == known.get("instruction") else None
    choices = first(CHOICES)
    letters = [one for one in names if str(one) in LETTERS[:8]]
    if choices is None and len(letters) > 1:

        def listed(row: Row) -> Any:
            return {key: row.value[key] for key in letters if row.value.get(key)}

    else:

        def listed(row: Row) -> Any:
            return row.value.get(str(choices))

    has_choices = choices is not None or len(letters) > 1
    one_based = has_choices and _counts_from_one([(listed(r), r.value.get(answer)) for r in rows])

    def from_columns(row: Row) -> dict[str, Any]:
        texts = [row.value.get(one) for one in (question, more) if one is not None]
        text = "\n".join(str(one) for one in texts if one not in (None, ""))
        gold = row.value.get(answer)
        gold = gold[0] if isinstance(gold, list) and gold else gold
        if not has_choices:
            return item(row, text, gold if type(gold) in (int, float) else str(gold or "").strip())
        options = _lettered(listed(row))
        found = item(row, text, _letter(options, gold, one_based))
        return {**found, "choices": options}

    words = " + ".join([question, *([more] if more else [])])
    words += f" + {choices or ', '.join(map(str, letters))}" if has_choices else ""
    return f"{words} -> {answer}{added}", from_columns


def split_turns(row: Row, turns: Any) -> tuple[str, str]:
    """Return the text before the last assistant turn, and that turn.

    Raises:
        UserError: There is none.
    """
    if isinstance(turns, str):
        with suppress(ValueError):
            turns = json.loads(turns)
    pairs = []
    for turn in turns if isinstance(turns, Sequence) and not isinstance(turns, str) else ():
        if isinstance(turn, Mapping):
            role = str(turn.get("role", turn.get("from", ""))).lower()
            role = {"gpt": "assistant", "human": "user"}.get(role, role)
            pairs.append((role, str(turn.get("content", turn.get("value", "")))))
    last = max((i for i, (role, _) in enumerate(pairs) if role == "assistant"), default=0)
    if last == 0:
        raise UserError(f"""{row.path}, item {row.place}: its turns have no answer; a turn is
            {{"role": "user" or "assistant", "content": text}}, and the last one is answered""")
    before = pairs[:last]
    named = sum(role == "assistant" for role, _ in before) > 0
    texts = [f"{role.capitalize()}: {text}" if named else text for role, text in before]
    return "\n\n".join(texts), pairs[last][1].strip()


def _lettered(choices: Any) -> dict[str, str]:
    """Return choices by letter, of a list, a mapping or its JSON, or of lists `text`, `label`."""
    if isinstance(choices, str):
        with suppress(ValueError):
            choices = json.loads(choices)
    if isinstance(choices, Mapping) and isinstance(choices.get("text"), Sequence):
        choices = choices["text"]
    if isinstance(choices, Mapping):
        choices = {str(key).strip().upper(): str(text) for key, text in choices.items()}
        return choices if set(choices) <= set(LETTERS) else _lettered([*choices.values()])
    if isinstance(choices, str) or not isinstance(choices, Sequence):
        return {}
    return dict(zip(LETTERS, map(str, choices), strict=False))


def _counts_from_one(pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Return whether the answers are places of the choices that are counted from 1."""
    places = Counter(str(answer) for _, answer in pairs)
    return not places["0"] and any(str(gold) == str(len(_lettered(of))) for of, gold in pairs)


def _letter(choices: Mapping[str, str], answer: Any, one_based: bool) -> str:
    """Return the letter of an answer: a letter, the text of a choice, or its place."""
    text = str(answer).strip()
    if text.upper() in choices:
        return text.upper()
    for letter, choice in choices.items():
        if isinstance(answer, str) and text == choice.strip():
            return letter
    place = int(text) - one_based if re.fullmatch(r"\d{1,2}", text) else -1
    return list(choices)[place] if 0 <= place < len(choices) else text
