"""A consortium in a Python program: `create_consortium(...)` and `orchestrate(prompt)`."""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from swarm.collab import Watch
from swarm.collab.configs import Config, build, member
from swarm.collab.deliberation.strategies import UNSURE
from swarm.collab.following import Left
from swarm.collab.members import member_of
from swarm.collab.older import modern
from swarm.consortium.asking import MAX_TOKENS, Question, apart, ask
from swarm.consortium.judges import usual_arbiter
from swarm.consortium.members import Members
from swarm.errors import UserError
from swarm.models import Message

logger = logging.getLogger(__name__)

OLDER = {"minimum_iterations": "min_iterations", "judging_method": "strategy"}
"""What arguments were called by older programs."""


def create_consortium(
    models: Sequence[str],
    confidence_threshold: float = 0.8,
    max_iterations: int = 3,
    min_iterations: int = 1,
    arbiter: str | None = None,
    system_prompt: str | None = None,
    default_count: int = 1,
    raw: bool = False,
    strategy: str = "default",
    log: bool = False,
    temperature: float | None = None,
    max_tokens: int = MAX_TOKENS,
    members: Members | None = None,
    **settings: Any,
) -> "Orchestrator":
    """A consortium that answers prompts, with the argument names of llm-consortium.

    Args:
        models: Who answers: a name, or with a count and options as in "gpt-4o:2,temperature=1".
        confidence_threshold: See `Consortium`; a
            threshold is from 0 to 1, or 10 to 100 as percent. `minimum_iterations` and
            `judging_method` are older names.
        max_iterations: See `confidence_threshold`.
        min_iterations: See `confidence_threshold`.
        strategy: See `confidence_threshold`.
        arbiter: Who judges; `None`: see `swarm.consortium.judges.usual_arbiter`.
        system_prompt: What members are told; `None` is a text of the house.
        default_count: Answers of each model that says no number.
        raw: Whether results have the arbiter's replies word by word, too.
        log: Whether runs are recorded in consortium.db in llm's folder, failed ones too.
        temperature: Of calls that say none; `None` leaves it to each model.
        max_tokens: New tokens of an answer that says nothing of it.
        members: Finds the models; `None`: `Members()`.
        **settings: All else that a `Config` has, such as `quorum` or `roles`.

    Raises:
        UserError: A value is not allowed, or a model, a package or a key is missing.
    """
    given = {"confidence_threshold": confidence_threshold, "max_iterations": max_iterations,
             "min_iterations": min_iterations, "strategy": strategy}  # fmt: skip
    for old, new in OLDER.items():
        if old in settings:
            given[new] = settings.pop(old)
    if isinstance(models, (str, Mapping)) or not models:
        raise UserError(f"models={models!r}: must be a list of names, one at least")
    found = members or Members()
    who = [member(one, found.known, default_count) for one in models]
    if arbiter is None:
        judge = usual_arbiter(str(given["strategy"]), who)
    else:
        judge = member(arbiter, found.known)
    config = Config.from_dict(
        {"system": system_prompt, **given, **settings, "members": who, "arbiter": judge}
    )
    if confidence_threshold != Config.confidence_threshold and config.strategy in UNSURE:
        logger.warning("confidence_threshold has no effect with strategy %s", config.strategy)
    return Orchestrator(config, found, raw, log, temperature, max_tokens)


class ConsortiumConfig(Config):
    """A `Config` that is made with the argument names of llm-consortium.

    Args:
        models: Names, or names with their counts; `members` in `Config`.
        system_prompt: `system` in `Config`.
        confidence_threshold, max_iterations: As there.
        minimum_iterations: `min_iterations` in `Config`.
        arbiter: `None`: see `swarm.consortium.judges.usual_arbiter`.
        **settings: All else that a `Config` has, or had in llm-consortium.

    Raises:
        UserError: A value is not allowed.
    """

    def __init__(
        self,
        models: Mapping[str, int] | Sequence[str] | None = None,
        system_prompt: str | None = None,
        confidence_threshold: float = 0.8,
        max_iterations: int = 3,
        minimum_iterations: int | None = None,
        arbiter: Any = None,
        **settings: Any,
    ) -> None:
        given = {**settings, "confidence_threshold": confidence_threshold,
                 "max_iterations": max_iterations}  # fmt: skip
        older = {"models": models, "system_prompt": system_prompt,
                 "minimum_iterations": minimum_iterations, "arbiter": arbiter}  # fmt: skip
        given |= {key: value for key, value in older.items() if value is not None}
        found, remarks = modern(given)
        for words in remarks:
            logger.warning("%s", words)
        if found.get("arbiter") is None and isinstance(found.get("members"), (list, tuple)):
            names = [member_of("members", one) for one in found["members"]]
            found["arbiter"] = usual_arbiter(str(found["strategy"]), names)
        made = Config.from_dict(found)
        super().__init__(**{field.name: getattr(made, field.name) for field in fields(Config)})


class Orchestrator:
    """Puts prompts to a consortium; each is answered for itself, several may be under way at once.

    Args:
        config: The consortium's settings.
        members: Finds its models.
        raw, log, temperature, max_tokens: See `create_consortium`.

    Attributes:
        consortium: The model behind it.

    Raises:
        UserError: A model, a package or a key is missing.
    """

    def __init__(
        self,
        config: Config,
        members: Members | None = None,
        raw: bool = False,
        log: bool = False,
        temperature: float | None = None,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self.config, self.raw, self.log = config, raw, log
        self.asked = {"temperature": temperature, "max_new_tokens": max_tokens}
        self.consortium = build(config, (members or Members()).model)
        self.consortium.check()

    def orchestrate(
        self, prompt: str | Sequence[Message], watch: Watch | None = None
    ) -> dict[str, Any]:
        """What the consortium came to; see `swarm.collab.outcome.result`.

        Works beside a running event loop, as in a notebook, which then waits.

        Args:
            prompt: The question, or a conversation of which it is the last turn.
            watch: Is told of each event.

        Raises:
            UserError: There is no answer.
        """
        turns = (Message("user", prompt),) if isinstance(prompt, str) else tuple(prompt)
        if not turns or not turns[-1].content.strip():
            raise UserError("the prompt is empty; give a question, or a conversation that ends "
                            "with it")  # fmt: skip
        question = Question(None, self.config, self.consortium, turns, self.asked, self.log)
        found = ask(question, watch)
        if not self.raw:
            for verdict in (found["synthesis"], *(one["synthesis"] for one in found["iterations"])):
                verdict.pop("raw_arbiter_response", None)
        return found

    async def aorchestrate(self, prompt: str | Sequence[Message]) -> dict[str, Any]:
        """As `orchestrate`, while the event loop goes on; cancelled, it begins no further call."""
        left = threading.Event()

        def watch(number: int, event: Any) -> None:
            if left.is_set():
                raise Left

        try:
            return await apart(self.orchestrate, prompt, watch)
        finally:
            left.set()


ConsortiumOrchestrator = Orchestrator
"""Its name in llm-consortium."""
