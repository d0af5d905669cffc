"""Fits a task's prompts to a model's context; items that are too long are refused or shortened."""

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from swarm.engine.base_model import BaseModel, quiet_transformers
from swarm.engine.tokenization import (
    apply_chat_template,
    encode_choice,
    encode_prompt,
)
from swarm.errors import UserError
from swarm.models.base import Completion, Request
from swarm.tasks.base import (
    HasGoldAnswers,
    Item,
    RequiresSetup,
    Task,
    gold_answers_error,
    metric_task,
)

log = logging.getLogger(__name__)

MAX_REPEATED_TOKENS = 64
"""Approximate tokens of the repeated instruction to a judge whose reply had no rating."""

UNTRUNCATED_FIELDS = ("id", "answer", "domain", "split", "task")
"""Fields of an item that are never truncated."""

MAX_ROUNDS = 20
"""Maximum number of rounds in `Task.run`; a task with more, given empty answers, is stopped."""


class TokenCounter:
    """Counts the tokens of prompts in batches, each distinct prompt once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._known: dict[Any, int] = {}

    def count_prompts(self, prompts: Iterable[Any]) -> None:
        """Count prompts: texts or chat turns.

        Raises:
            UserError: Turns cannot be rendered: the chat template is missing or rejects them.
        """
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._known]
        plain = [prompt for prompt in new if isinstance(prompt, str)]
        turns = [prompt for prompt in new if not isinstance(prompt, str)]
        if turns and not getattr(self.tokenizer, "chat_template", None):
            # Without a template, turns are rendered by fixed rules of the tokenizer, or fail.
            self._known |= {prompt: len(encode_prompt(self.tokenizer, prompt)) for prompt in turns}
            turns = []
        written = [
            str(apply_chat_template(self.tokenizer, prompt, tokenize=False)) for prompt in turns
        ]
        for some, texts, special in ((plain, plain, True), (turns, written, False)):
            if texts:
                with quiet_transformers():
                    rows = self.tokenizer(texts, add_special_tokens=special).input_ids
                self._known |= {p: max(1, len(row)) for p, row in zip(some, rows, strict=True)}

    def tokens_needed(self, prompt: Any, choices: Sequence[str], new: int, context: float) -> int:
        """Return the tokens of a prompt and its longest choice, or of `new` more without any."""
        self.count_prompts([prompt])
        known = self._known[prompt]
        if not choices:
            return known + max(1, new)
        # Byte length bounds the number of tokens from above, and is cheaper than encoding.
        longest = max(len(choice.encode("utf-8", "replace")) for choice in choices) + 1
        if known + longest > context:
            longest = max(len(encode_choice(self.tokenizer, prompt, choice)) for choice in choices)
        return known + max(1, longest)


def fit_to_context(
    task: Task,
    tokenizer: Any,
    context: float,
    splits: Sequence[str] = ("dev", "test"),
    key: str = "task",
) -> list[str]:
    """Check that the tokenizer can render the task's prompts and that they fit into the context.

    All rounds of `Task.run` are counted, as if earlier answers had their maximum length (only the
    first round if the task has a scorer to set up), and the gold answers used for gradients. Items
    that do not fit are refused, or dropped or truncated if the task's `too_long` is set so.

    Args:
        context: Context length in tokens; infinity if unknown.
        splits: The splits that are used; the others may contain items of any length.
        key: The task's configuration key, for messages.

    Returns:
        Lines on what was dropped or truncated; they are logged too.

    Raises:
        UserError: Turns cannot be rendered, or items are too long.
    """
    if parts := getattr(task, "tasks", None):
        found = [
            fit_to_context(part, tokenizer, context, splits, f"{key}.tasks.{n}")
            for n, part in parts.items()
        ]
        return [line for lines in found for line in lines]
    lengths = TokenCounter(tokenizer)
    messages = []
    for split in splits:
        messages += _fit_split(task, split, lengths, context, key)
    for line in messages:
        log.warning(line)
    return messages


def _fit_split(
    task: Task, split: str, lengths: TokenCounter, context: float, key: str
) -> list[str]:
    """Run `fit_to_context` on one split of a task without parts."""
    try:
        items = task.items(split)
    except UserError:
        if split == "dev":
            raise
        return []  # the error is raised where the test split is used
    requests = [_item_requests(task, item, split) for item in items]
    lengths.count_prompts(prompt for mine in requests for prompt, _, _ in mine)
    needs = [max(lengths.tokens_needed(*one, context) for one in mine) for mine in requests]
    messages = _handle_long_items(task, split, needs, context, lengths, "the model's", key)
    # A judge's prompt is never truncated: it contains the item and the full answer.
    needs, context = _judge_token_needs(task, task.items(split))
    return messages + _handle_long_items(task, split, needs, context, lengths, "the judge's", key)


def _handle_long_items(
    task: Task,
    split: str,
    needs: Sequence[int],
    context: float,
    lengths: TokenCounter,
    model: str,
    key: str,
) -> list[str]:
    """Refuse, drop or truncate the items of a split that exceed the context."""
    items = task.items(split)
    long = [index for index, tokens in enumerate(needs) if tokens > context]
    if not long:
        return []
    worst = max(long, key=lambda index: needs[index])
    policy = getattr(task, "too_long", "refuse")
    about = f"{task.name}: {len(long)} of {len(items)} {split} items do not fit into {model} "
    about += f"{context:.0f} tokens; the longest, item {items[worst]['id']!r}, "
    about += f"needs {needs[worst]:,} including its answer"
    if model == "the judge's" and policy == "truncate":
        raise UserError(f"{about}; prompts to a judge are not truncated: set {key}.too_long=drop")
    if policy == "refuse" or not hasattr(task, "replace_items"):
        raise UserError(f"{about}; shorten them, or set {key}.too_long=drop or truncate")
    kept = list(items)
    if policy == "truncate":
        for index in long:
            kept[index] = _truncate_item(task, items[index], split, lengths, context, about, key)
    else:
        kept = [item for index, item in enumerate(items) if index not in set(long)]
    if not kept:
        raise UserError(f"{about}; no item would remain after dropping them")
    task.replace_items(split, kept)
    return [
        f"{about}; {key}.too_long={policy}: {len(long)} "
        f"{'dropped' if policy == 'drop' else 'truncated'}"
    ]


def _judge_token_needs(task: Task, items: Sequence[Item]) -> tuple[list[int], float]:
    """Return the token needs of a local judge per item, and its context; empty for other scorers.

    Assumes that the answer has its maximum length and that the judge's reply is requested twice.
    """
    scorer = getattr(task, "scorer", None)
    model = getattr(scorer, "model", None)
    base = getattr(getattr(model, "model", model), "base", None)
    folder = (
        base.on_disk() if isinstance(base, BaseModel) and hasattr(scorer, "build_prompt") else None
    )
    if folder is None or base is None or scorer is None:
        return [], math.inf
    lengths = TokenCounter(base.load_tokenizer(folder))
    prompts = [scorer.build_prompt(item) for item in items]
    lengths.count_prompts(prompts)
    after = getattr(task, "max_new_tokens", 0) + 2 * scorer.max_new_tokens + MAX_REPEATED_TOKENS
    context = base.context_length()
    return [lengths.tokens_needed(prompt, (), after, context) for prompt in prompts], context


def _item_requests(task: Task, item: Item, split: str) -> list[tuple[Any, Sequence[str], int]]:
    """Return each prompt of one item with its choices and the maximum of tokens after it."""
    found: list[tuple[Any, Sequence[str], int]] = []
    # With another signal, search and final verdict make different requests.
    for played in {id(one): one for one in (task, metric_task(task))}.values():
        earlier = 0
        for requests in _iterate_rounds(played, [item], MAX_ROUNDS):
            # A later round may quote the answers of an earlier one.
            found += [(one.prompt, one.choices, one.token_limit + earlier) for one in requests]
            if earlier and requests:
                found += [(one.prompt, (), earlier + 1) for one in requests if one.choices]
            earlier += max((one.token_limit for one in requests), default=0)
    if split == "dev" and isinstance(task, HasGoldAnswers) and gold_answers_error(task) is None:
        found += [(one.prompt, one.choices, 0) for one in task.gold_examples([item])]
    return found


def _truncate_item(
    task: Task, item: Item, split: str, lengths: TokenCounter, context: float, about: str, key: str
) -> Item:
    """Truncate the beginnings of an item's longest texts, as little as needed."""

    def tokens_needed(changed: Item) -> int:
        requests = _item_requests(task, changed, split)
        return max(lengths.tokens_needed(*one, context) for one in requests)

    reference = getattr(task, "reference_field", None)
    texts = [
        name
        for name, text in item.items()
        if isinstance(text, str) and name not in (*UNTRUNCATED_FIELDS, reference)
    ]
    for name in sorted(texts, key=lambda name: -len(item[name])):
        text, before = item[name], tokens_needed(item)
        if tokens_needed({**item, name: ""}) >= before:
            continue  # not part of the prompt
        # Bisect the longest suffix that fits; 16 characters per token is an upper bound.
        low, high = -1, min(len(text) - 1, int(16 * context))
        while low < high:
            middle = (low + high + 1) // 2
            fits = tokens_needed({**item, name: text[len(text) - middle :]}) <= context
            low, high = (middle, high) if fits else (low, middle - 1)
        if low >= 0:
            return {**item, name: text[len(text) - low :]}
        item = {**item, name: ""}
    raise UserError(f"{about}; the rest of it cannot be truncated: set {key}.too_long=drop")


def _iterate_rounds(task: Task, items: Sequence[Item], max_rounds: int) -> Iterator[list[Request]]:
    """Yield the requests of each round of `Task.run`, given empty answers."""
    play = task.run(items)
    answers: list[Completion] | None = None
    for _ in range(1 if isinstance(task, RequiresSetup) else max_rounds):
        try:
            # The first value sent to a generator must be None.
            requests = play.send(answers)  # type: ignore[arg-type]
        except StopIteration:
            break
        yield requests
        answers = [_empty_completion(len(request.choices)) for request in requests]
    play.close()


def _empty_completion(choices: int) -> Completion:
    """Return an empty answer with log-probability 0 for each choice, of one token each."""
    return Completion("", (0.0,) * choices, choice_tokens=(1,) * choices)
