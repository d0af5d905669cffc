"""Perplexity: how well a model predicts the user's text, in bits per byte."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from swarm._util.files import find_path
from swarm._util.jsonl import read_json_rows, read_utf8
from swarm._util.settings import Count, Positive, Text, checked
from swarm.errors import UserError
from swarm.models.base import Completion, Example, Request
from swarm.tasks.base import Item, Score, SplitTask, TaskRun

UNIFORM_BITS_PER_BYTE = 8.0
"""Bits per byte of a uniform distribution over all bytes."""


@checked("task")
@dataclass(eq=False)
class Perplexity(SplitTask):
    """Windows of a text, each scored as the continuation of the text before it.

    The file is plain text, or JSON lines (.jsonl) with a "text" each, which are separate texts.
    Windows do not overlap, and are cut at white space, so that all models are scored on the same
    texts independent of their tokenizers; a text's first window begins after the model's
    beginning-of-text token. The seed divides the windows into two halves, dev and test, and
    shuffles each half; a limit takes the first of it. A window's context may belong to the other
    half: it is read and not scored.

    The utility is minus the bits per byte (log base 2), which unlike the perplexity per token can
    be compared between tokenizers: 0 is certainty, and higher is better. It is computed over the
    bytes of all windows together: an item's value is minus its bits over the mean bytes of its
    split's windows, so that the utility is the values' mean. Each score's measures are the window's
    own "bits_per_byte", "perplexity" (per token) and "tokens". A window that cannot be scored,
    because a model's numbers overflow, counts 8 bits per byte.

    Args:
        name: The task's name.
        file: Path of the file, UTF-8.
        window: Maximum number of characters of a window.
        context: Maximum number of characters shown before a window.
        dev_limit: Maximum number of dev windows; `None` is all.
        test_limit: Maximum number of test windows; `None` is all.
        seed: Seed of the division into dev and test.
        dev_seed: Seed of another order of the dev windows, from which `dev_limit` takes the first;
            `None` is that of `seed`. The test windows never depend on it.
        max_prompt_tokens: Windows whose context is longer are left out.
    """

    name: Text = "perplexity"
    file: str | None = None
    window: Positive = 1000
    context: Count = 500
    dev_limit: Positive | None = None
    test_limit: Positive | None = None
    seed: Count = 0
    dev_seed: Count | None = None
    max_prompt_tokens: Positive | None = None

    highest, lowest = 0.0, -math.inf
    votes = False
    gold_error = None

    def replace_items(self, split: str, items: Sequence[Item]) -> None:
        mean_bytes = sum(count_bytes(item["answer"]) for item in items) / len(items)
        super().replace_items(split, [{**item, "mean_bytes": mean_bytes} for item in items])

    def run(self, items: Sequence[Item]) -> TaskRun:
        """Score every window, in one round."""
        completions = yield [Request(item["prompt"], 0, (item["answer"],)) for item in items]
        return [self.score_completion(*pair) for pair in zip(items, completions, strict=True)]

    def gold_examples(self, items: Sequence[Item]) -> list[Example]:
        """See `Task.gold_examples`: the loss in bits per byte, minus the utility."""
        return [
            Example(item["prompt"], (item["answer"],), unit=item["mean_bytes"] * math.log(2))
            for item in items
        ]

    def grade(self, item: Item, answer: str | None) -> float:
        """Return the value, which a score's answer contains as text; 8 bits per byte for `None`."""
        if answer is not None:
            return float(answer)
        return -UNIFORM_BITS_PER_BYTE * count_bytes(item["answer"]) / item["mean_bytes"]

    def score_completion(self, item: Item, completion: Completion) -> Score:
        """Score a window by its log probability.

        Raises:
            UserError: The model returns none.
        """
        logprob = choice_logprob(completion, f"task={self.name}")
        if not math.isfinite(logprob):
            return Score(self.grade(item, None), None)
        bits = -logprob / math.log(2)
        value = -bits / item["mean_bytes"]
        tokens = sum(completion.choice_tokens)
        measures = {"bits_per_byte": bits / count_bytes(item["answer"]), "tokens": float(tokens)}
        if tokens:
            measures["perplexity"] = math.exp(min(-logprob / tokens, 700.0))
        return Score(value, repr(value), measures=measures)

    def load_items(self, split: str) -> list[Item]:
        """Return the windows of a split, from the file."""
        if self.file is None:
            raise UserError("task.file: name a text file, or a .jsonl file with one text per line.")
        path = find_path(self.file)
        if path.suffix == ".jsonl":
            texts = [row["text"] for row in read_json_rows(path, {"text": str})]
        else:
            texts = [read_utf8(path)]
        if "\0" in "".join(texts):
            raise UserError(f"{path} contains zero bytes; task.file must be a text file")
        found: list[Item] = [
            {
                "id": f"{number}:{start}",
                "prompt": preceding_context(text, start, self.context),
                "answer": part,
            }
            for number, text in enumerate(texts)
            for start, part in split_windows(text, self.window)
        ]
        if len(found) < 2:
            raise UserError(f"""{path} is empty or too short: {len(found)} windows of {self.window}
                characters, but dev and test need one each; lower task.window.""")
        random.Random(self.seed).shuffle(found)
        half = (len(found) + 1) // 2
        if split == "test":
            return found[half:][: self.test_limit]
        dev = found[:half]
        if self.dev_seed is not None:
            random.Random(f"{self.dev_seed}/dev").shuffle(dev)
        return dev[: self.dev_limit]


def split_windows(text: str, limit: int) -> list[tuple[int, str]]:
    """Split a text into nonempty pieces of at most `limit` characters, each with its start index.

    A piece ends before white space in its second half, with which the next one begins; without
    white space there, it ends at `limit` characters.
    """
    found, start = [], 0
    while start < len(text):
        end = start + limit
        if end < len(text):
            offsets = range(end, start + limit // 2, -1)
            end = next((p for p in offsets if text[p].isspace() and not text[p - 1].isspace()), end)
        found.append((start, text[start:end]))
        start = end
    return [(offset, part) for offset, part in found if part.strip()]


def preceding_context(text: str, start: int, limit: int) -> str:
    """Return at most `limit` characters before an index, starting at the beginning of a word."""
    first = max(0, start - limit)
    shown = text[first:start]
    if first == 0 or not shown or shown[0].isspace() or text[first - 1].isspace():
        return shown
    _, space, rest = shown.partition(" ")
    return space + rest


def choice_logprob(completion: Completion, key: str) -> float:
    """Return the log probability of a request's only choice.

    Raises:
        UserError: The model returned none; the message begins with `key`.
    """
    if len(completion.logprobs) != 1:
        raise UserError(f"""{key} needs a model that returns the log probability of a text; this one
            does not.""")
    return completion.logprobs[0]


def count_bytes(text: str) -> int:
    """Return the number of bytes of a text in UTF-8."""
    return len(text.encode("utf-8", "surrogatepass"))
