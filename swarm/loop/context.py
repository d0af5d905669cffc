"""Checks that a task's prompts fit into a model's context, before anything is written."""

import contextlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from swarm.engine.base_model import quiet_transformers
from swarm.engine.tokenization import apply_chat_template, encode_choice, encode_prompt
from swarm.errors import UserError
from swarm.models.base import Completion
from swarm.tasks.base import Item, Task

log = logging.getLogger(__name__)

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


def check_context(
    task: Task,
    tokenizer: Any,
    context: float,
    splits: Sequence[str] = ("dev", "test"),
    key: str = "task",
) -> None:
    """Check that the tokenizer can render the task's prompts and that they fit into the context.

    All rounds of `Task.run` are counted, as if earlier answers had their maximum length (only the
    first round of a task that `needs_setup`), and the gold answers used for gradients. Items with a
    prompt of more than the task's `max_prompt_tokens` are left out first, with a warning.

    Args:
        context: Context length in tokens; infinity if unknown.
        splits: The splits that are used; the others may contain items of any length.
        key: The task's configuration key, for messages.

    Raises:
        UserError: Turns cannot be rendered, or an item is too long; the longest is named.
    """
    for part, subtask in task.tasks.items():
        check_context(subtask, tokenizer, context, splits, f"{key}.tasks.{part}")
    if task.tasks:
        return
    lengths = TokenCounter(tokenizer)
    graded = "dev" in splits and task.gold_error is None
    for split in splits:
        try:
            items = task.items(split)
        except UserError:
            if split == "dev":
                raise
            continue  # the error is raised where the test split is used
        requests = [_item_requests(task, item, graded and split == "dev") for item in items]
        lengths.count_prompts(prompt for mine in requests for prompt, _, _ in mine)
        if (limit := task.max_prompt_tokens) is not None:
            longest = [
                max(lengths.tokens_needed(prompt, (), 0, context) for prompt, _, _ in mine)
                for mine in requests
            ]
            kept = [index for index, tokens in enumerate(longest) if tokens <= limit]
            if not kept:
                raise UserError(f"{key}.max_prompt_tokens={limit}: leaves no {split} item")
            if left_out := len(items) - len(kept):
                words = f"{task.name}: {left_out} of {len(items)} {split} items are left out"
                log.warning("%s (%s.max_prompt_tokens=%d)", words, key, limit)
                items, requests = [items[i] for i in kept], [requests[i] for i in kept]
                task.replace_items(split, items)
        needs = [max(lengths.tokens_needed(*one, context) for one in mine) for mine in requests]
        if long := sum(tokens > context for tokens in needs):
            worst = max(range(len(needs)), key=needs.__getitem__)
            raise UserError(
                f"{task.name}: {long} of {len(items)} {split} items do not fit into the model's "
                f"{context:.0f} tokens; the longest, item {items[worst]['id']!r}, needs "
                f"{needs[worst]:,} including its answer; shorten them, or leave long ones out by "
                f"{key}.max_prompt_tokens"
            )


def _item_requests(task: Task, item: Item, graded: bool) -> list[tuple[Any, Sequence[str], int]]:
    """Return each prompt of one item with its choices and the maximum of tokens after it."""
    found: list[tuple[Any, Sequence[str], int]] = []
    # With another signal, search and final verdict make different requests.
    for played in {id(one): one for one in (task, task.metric_task)}.values():
        play, earlier = played.run([item]), 0
        answers: list[Completion] | None = None  # the first value sent to a generator
        with contextlib.suppress(StopIteration):
            for _ in range(1 if played.needs_setup else MAX_ROUNDS):
                requests = play.send(answers)  # type: ignore[arg-type]
                # A later round may quote the answers of an earlier one.
                found += [(one.prompt, one.choices, one.token_limit + earlier) for one in requests]
                if earlier:
                    found += [(one.prompt, (), earlier + 1) for one in requests if one.choices]
                earlier += max((one.token_limit for one in requests), default=0)
                answers = [
                    Completion("", (0.0,) * len(one.choices), choice_tokens=(1,) * len(one.choices))
                    for one in requests
                ]
        play.close()
    if graded:
        found += [(one.prompt, one.choices, 0) for one in task.gold_examples([item])]
    return found
