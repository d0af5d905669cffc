"""A conversation: its turns, what its system turn says, and how much of it fits."""

from collections.abc import Callable
from math import ceil

from swarm.errors import UserError
from swarm.models import Message

Messages = tuple[Message, ...]

CHARS_PER_TOKEN = 4
"""For estimates: nobody's tokenizer is asked. English has a little more, other scripts less."""


def prompt_to_messages(prompt: str | Messages) -> Messages:
    """A prompt as turns; a plain text is one turn of the user."""
    return (Message("user", prompt),) if isinstance(prompt, str) else tuple(prompt)


def add_system_text(turns: Messages, text: str | None) -> Messages:
    """The turns with `text` at the end of the system's turn, which stands first where it is new."""
    if text is None:
        return turns
    for place, turn in enumerate(turns):
        if turn.role == "system":
            longer = Message("system", f"{turn.content}\n\n{text}")
            return (*turns[:place], longer, *turns[place + 1 :])
    return (Message("system", text), *turns)


def estimate_tokens(turns: Messages) -> int:
    """About how many tokens the turns are."""
    return ceil(sum(len(turn.content) for turn in turns) / CHARS_PER_TOKEN)


def find_exchanges(turns: Messages) -> list[list[int]]:
    """The places of each exchange before the last one: a user's turn and what follows it.

    The system's turns belong to none, and the last user's turn with what follows is the last one.
    """
    found: list[list[int]] = []
    for place, turn in enumerate(turns):
        if turn.role == "system":
            continue
        if turn.role == "user" or not found:
            found.append([])
        found[-1].append(place)
    return found[:-1]


def fit_to_context(turns: Messages, context: int | None, write: Callable[[Messages], Messages]) -> tuple[Messages, int]:
    """What `write` makes of the turns, and how many of the oldest exchanges were left out for it.

    Args:
        turns: A conversation.
        context: The most tokens that may be written, by `tokens`; `None` is no limit.
        write: Puts to a conversation what else there is to say.

    Raises:
        UserError: Without any old exchange it is still too long.
    """
    old = find_exchanges(turns)
    for left_out in range(len(old) + 1):
        gone = {place for exchange in old[:left_out] for place in exchange}
        written = write(tuple(turn for place, turn in enumerate(turns) if place not in gone))
        if context is None or estimate_tokens(written) <= context:
            return written, left_out
    raise UserError(
        f"context={context}: the last question and the answers that belong to it are about "
        f"{estimate_tokens(written)} tokens, and none of them is cut; raise context, or have the proposers "
        "write less (max_tokens)"
    )
