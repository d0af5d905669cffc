"""Who arbitrates where nobody was named."""

from collections.abc import Sequence

from swarm.collab.configs import MemberSpec, read_preset
from swarm.errors import UserError
from swarm.models.llm import LLM


def default_arbiter(strategy: str, members: Sequence[MemberSpec]) -> MemberSpec | None:
    """Nobody with "vote"; else the first program's arbiter if llm can ask it, or the first member.

    Args:
        strategy: The consortium's.
        members: Its members.
    """
    if strategy == "vote" or not members:
        return None
    usual = read_preset("classic").arbiter
    return usual if usual and is_available_in_llm(usual.model) else MemberSpec(members[0].model)


def is_available_in_llm(name: str) -> bool:
    """Whether llm knows a model and has its key."""
    try:
        LLM(name).check()
    except UserError:
        return False
    return True
