"""A consortium in a Python program: `create_consortium(...)` and `orchestrate(prompt)`."""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from swarm.collab import OnEvent
from swarm.collab.configs import ConsortiumSettings, build_consortium, parse_member
from swarm.collab.deliberation.strategies import UNSURE
from swarm.collab.following import Cancelled
from swarm.collab.members import member_from_config
from swarm.collab.older import convert_settings
from swarm.consortium.asking import MAX_TOKENS, ConsortiumQuestion, run_in_daemon_thread, answer_question
from swarm.consortium.judges import default_arbiter
from swarm.consortium.members import MemberRegistry
from swarm.errors import UserError
from swarm.models import Message

logger = logging.getLogger(__name__)

LEGACY_ARGUMENTS = {"minimum_iterations": "min_iterations", "judging_method": "strategy"}
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
    members: MemberRegistry | None = None,
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
    for old, new in LEGACY_ARGUMENTS.items():
        if old in settings:
            given[new] = settings.pop(old)
    if isinstance(models, (str, Mapping)) or not models:
        raise UserError(f"models={models!r}: must be a list of names, one at least")
    found = members or MemberRegistry()
    who = [parse_member(one, found.is_known_name, default_count) for one in models]
    if arbiter is None:
        judge = default_arbiter(str(given["strategy"]), who)
    else:
        judge = parse_member(arbiter, found.is_known_name)
    config = ConsortiumSettings.from_dict(
        {"system": system_prompt, **given, **settings, "members": who, "arbiter": judge}
    )
    if confidence_threshold != ConsortiumSettings.confidence_threshold and config.strategy in UNSURE:
        logger.warning("confidence_threshold has no effect with strategy %s", config.strategy)
    return Orchestrator(config, found, raw, log, temperature, max_tokens)


class ConsortiumConfig(ConsortiumSettings):
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
        found, remarks = convert_settings(given)
        for words in remarks:
            logger.warning("%s", words)
        if found.get("arbiter") is None and isinstance(found.get("members"), (list, tuple)):
            names = [member_from_config("members", one) for one in found["members"]]
            found["arbiter"] = default_arbiter(str(found["strategy"]), names)
        made = ConsortiumSettings.from_dict(found)
        super().__init__(**{field.name: getattr(made, field.name) for field in fields(ConsortiumSettings)})


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
        config: ConsortiumSettings,
        members: MemberRegistry | None = None,
        raw: bool = False,
        log: bool = False,
        temperature: float | None = None,
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self.config, self.raw, self.log = config, raw, log
        self.asked = {"temperature": temperature, "max_new_tokens": max_tokens}
        self.consortium = build_consortium(config, (members or MemberRegistry()).model)
        self.consortium.check()

    def orchestrate(
        self, prompt: str | Sequence[Message], watch: OnEvent | None = None
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
        question = ConsortiumQuestion(None, self.config, self.consortium, turns, self.asked, self.log)
        found = answer_question(question, watch)
        if not self.raw:
            for verdict in (found["synthesis"], *(one["synthesis"] for one in found["iterations"])):
                verdict.pop("raw_arbiter_response", None)
        return found

    async def aorchestrate(self, prompt: str | Sequence[Message]) -> dict[str, Any]:
        """As `orchestrate`, while the event loop goes on; cancelled, it begins no further call."""
        left = threading.Event()

        def raise_if_cancelled(number: int, event: Any) -> None:
            if left.is_set():
                raise Cancelled

        try:
            return await run_in_daemon_thread(self.orchestrate, prompt, raise_if_cancelled)
        finally:
            left.set()


ConsortiumOrchestrator = Orchestrator
"""Its name in llm-consortium."""
