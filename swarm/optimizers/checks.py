"""Rules of numeric options, and checks that name the option in their error."""

from collections.abc import Callable, Sequence
from typing import Any

from swarm.errors import UserError

Rule = tuple[type, Callable[[Any], bool], str]
MAX_VALUE = 1e6
"""Maximum of any number; beyond it, sums of coefficients lose float precision."""

NOT_NEGATIVE: Rule = (
    float,
    lambda value: 0 <= value <= MAX_VALUE,
    f"a number from 0 to {MAX_VALUE:g}",
)
POSITIVE: Rule = (
    float,
    lambda value: 0 < value <= MAX_VALUE,
    f"a number above 0, at most {MAX_VALUE:g}",
)
STEP: Rule = (float, lambda value: 0 < value <= 100, "a number above 0, at most 100")
SHARE: Rule = (float, lambda value: 0 < value <= 1, "a number above 0, at most 1")
PROBABILITY: Rule = (float, lambda value: 0 <= value <= 1, "a number from 0 to 1")
MOST_ROWS = 10_000
"""Maximum number of positions of an ask, or items of a batch; each is evaluated separately."""

ROWS: Rule = (int, lambda value: 1 <= value <= MOST_ROWS, f"an integer from 1 to {MOST_ROWS:,}")
AT_LEAST_ONE: Rule = (int, lambda value: value >= 1, "an integer, 1 or more")
COUNT: Rule = (int, lambda value: value >= 0, "an integer, 0 or more")
SWITCH: Rule = (bool, lambda value: True, "true or false")


def check_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Check that the option `name` has one of the allowed values.

    Raises:
        UserError: It has not.
    """
    if value not in allowed:
        raise UserError(f"optimizer.{name}={value}: must be one of {', '.join(allowed)}")


def check_number(name: str, value: Any, rule: Rule, advice: str) -> None:
    """Check the option `name` against its rule.

    Raises:
        UserError: The rule is violated; the message ends with the advice.
    """
    kind, allowed, wording = rule
    kinds = (int, float) if kind is float else kind
    right_kind = isinstance(value, kinds) and isinstance(value, bool) == (kind is bool)
    if not (right_kind and allowed(value)):
        raise UserError(f"optimizer.{name}={value}: must be {wording}, {advice}")


def check_particles(particles: Any, least: int, advice: str) -> None:
    """Check that optimizer.particles is null or a valid number of rows.

    Raises:
        UserError: It is not.
    """
    if particles is not None:
        wording = f"an integer, {least} or more, at most {MOST_ROWS:,}"
        rule: Rule = (int, lambda value: least <= value <= MOST_ROWS, wording)
        check_number("particles", particles, rule, advice)


def check_pool_size(experts: int, particles: int | None) -> None:
    """Check that this many particles can contain all experts; None is as many as needed.

    Raises:
        UserError: Fewer than 2 experts, or fewer particles than experts.
    """
    if experts < 2:
        raise UserError(f"""pool.experts: {experts} given; a search mixes 2 or more, list more
            with pool.experts=[...]""")
    if particles is not None and particles < experts:
        raise UserError(f"""optimizer.particles={particles} is fewer than the pool's {experts}
            experts; allowed: {experts} or more; raise it or list fewer experts in
            pool.experts=[...]""")


def check_saved_state(
    state: dict[str, Any], name: str, particles: int | None, groups: int | None
) -> None:
    """Check that a saved state fits this optimizer; None accepts any number.

    Raises:
        UserError: The state belongs to another optimizer, number of particles or groups.
    """
    if state.get("optimizer") != name:
        raise UserError(f"""optimizer: the saved search is of {state.get("optimizer")!r}, not
            of {name!r}; resume with that optimizer, or start a new run""")
    if particles not in (None, count := len(state["positions"])):
        raise UserError(f"""optimizer.particles={particles}: must be {count}, as in the
            saved search; start a new run to change it""")
    if groups not in (None, count := state["groups"]):
        raise UserError(f"""pool.groups: gives {groups} groups of modules, and the saved search has
            {count}; restore the value, or start a new run to change it""")
