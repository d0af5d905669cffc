"""What a task asks and has judged, found out without a model that answers and without a scorer."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from swarm.engine.tokens import prompt_ids, tokens_read
from swarm.models import Completion, Request
from swarm.tasks import Prepared, Task
from swarm.tasks.mixture import Mixture

CHARACTERS = 4
"""Of English text a token, where there is no tokenizer to ask."""

ROUNDS = 20
"""A play that asks for more rounds than this, told nothing but empty answers, is let go."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """What the task asks about dev.

    Attributes:
        tokens: Of each request, of all rounds of a play.
        new: The most tokens that one may be answered with.
        how: How tokens were counted, in words.
    """

    tokens: list[int]
    new: int
    how: str


def try_prompts(task: Task, tokenizer: Any) -> None:
    """See that a tokenizer can write what the task first asks about dev, text and turns alike.

    Raises:
        UserError: It cannot: turns, and no chat template.
    """
    first, _ = requests(task, rounds=1)
    for request in {type(request.prompt): request for request in first}.values():
        prompt_ids(tokenizer, request.prompt)


def asked(task: Task, tokenizer: Any) -> Prompts:
    """The requests of all rounds about all dev items, and their lengths."""
    first, later = requests(task)
    each = [*first, *later]
    new = max(request.max_new_tokens for request in each)
    empty = "; in later rounds as if all answers were empty" if later else ""
    if tokenizer:
        tokens = [tokens_read(tokenizer, request) for request in each]
        return Prompts(tokens, new, f"counted by the base's tokenizer{empty}")
    texts = (
        r.prompt if isinstance(r.prompt, str) else "".join(turn.content for turn in r.prompt)
        for r in each
    )
    how = f"estimated at {CHARACTERS} characters a token, as the base is not on this disk{empty}"
    return Prompts([-(-len(text) // CHARACTERS) for text in texts], new, how)


def requests(task: Task, rounds: int = ROUNDS) -> tuple[list[Request], list[Request]]:
    """What the task asks about dev in its first round, and later if all answers are empty.

    One with something to open (`Prepared`: a judge, a reward model) is asked for its first round
    alone, as its scores may cost money.
    """
    if isinstance(task, Mixture):
        parts = [requests(part, rounds) for part in task.tasks.values()]
        return [r for first, _ in parts for r in first], [r for _, later in parts for r in later]
    play = task.play(task.items("dev"))
    first: list[Request] = []
    later: list[Request] = []
    answers: list[Completion] | None = None
    for number in range(1 if isinstance(task, Prepared) else rounds):
        try:
            # The first `send` to a generator has to be None.
            asked = play.send(answers)  # type: ignore[arg-type]
        except StopIteration:
            break
        (later if number else first).extend(asked)
        answers = [_empty(len(request.choices)) for request in asked]
    play.close()
    return first, later


def _empty(choices: int) -> Completion:
    """An answer that says nothing, and that so many choices of a token each are certain."""
    return Completion("", (0.0,) * choices, choice_tokens=(1,) * choices)


def judged(task: Task, split: str) -> Counter[str]:
    """How many texts of one position each kind of scorer judges that has something to open."""
    if isinstance(task, Mixture):
        return sum((judged(part, split) for part in task.tasks.values()), Counter())
    scorer = getattr(task, "scorer", None)
    count = len(task.items(split)) if isinstance(scorer, Prepared) else 0
    return Counter({type(scorer).__name__: count} if count else {})
