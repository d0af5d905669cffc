"""Command line options of consortia, and the resulting configuration and registry."""

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click

from swarm.errors import UserError
from swarm.models.base import Model
from swarm.models.cache import Cache
from swarm.models.llm import LLM
from swarm.models.providers import Providers
from swarm.multi_agent.consortium.config import (
    NO_CLUSTERING,
    ConsortiumSettings,
    MemberSpec,
    normalize_threshold,
    parse_member,
    present_strategy,
    read_preset,
)
from swarm.multi_agent.consortium.consortium import STRATEGIES
from swarm.multi_agent.consortium.store import load_config
from swarm.multi_agent.consortium.strategies import UNSURE
from swarm.registry.registry import Roster


def default_arbiter(strategy: str, members: Sequence[MemberSpec]) -> MemberSpec | None:
    """Return the default arbiter: llm-consortium's if llm has it, else the first member.

    For the strategy "vote" there is none.

    Args:
        strategy: Strategy of the consortium.
        members: Its members.
    """
    if strategy == "vote" or not members:
        return None
    classic = read_preset("classic").arbiter
    return (
        classic if classic and is_available_in_llm(classic.model) else MemberSpec(members[0].model)
    )


def is_available_in_llm(name: str) -> bool:
    """Return whether llm has a model and its key."""
    try:
        LLM(name).check()
    except UserError:
        return False
    return True


class MemberRegistry(Roster):
    """A registry that resolves every name like that of a member; see `Roster.member`.

    Args:
        providers, base, pool, device: See `Roster`.
        cache: See `Roster`; none by default, as users of llm expect.
    """

    def __init__(
        self,
        providers: Providers | None = None,
        base: str | None = None,
        pool: str | Path = "initial_experts",
        device: str | None = None,
        cache: Cache | Literal["default"] | None = None,
    ) -> None:
        super().__init__(providers, base, pool, device, cache)

    @property
    def uses_local(self) -> bool:
        """True if a local model was resolved, whose weights the first question loads."""
        return any(name.startswith("local/") for name in self._models)

    def is_known_name(self, name: str) -> bool:
        """Return whether a model has exactly this name, so that no part of it is a sample count."""
        return self._name_resolver.is_known_name(name)

    def model(self, name: str) -> Model:
        """See `Roster.member`."""
        return self.member(name)


log = logging.getLogger(__name__)

ClickCommand = Callable[..., Any]

DIRECT_OPTIONS = (
    "confidence_threshold",
    "max_iterations",
    "min_iterations",
    "strategy",
    "quorum",
    "seed",
    "context",
    "budget",
    "max_cost",
    "eliminate",
    "keep",
    "similarity",
)
"""Options that are configuration fields of the same name."""


class ResolvedConfig(NamedTuple):
    """Configuration resulting from the options.

    Attributes:
        config: The settings.
        name: Name of the saved consortium or preset; `None` if built from options alone.
        origin: Source of the settings, for messages.
    """

    config: ConsortiumSettings
    name: str | None
    origin: str


class ConfidenceType(click.ParamType):
    """Parameter type for a confidence: 0.8, 80 or 80%."""

    name = "confidence"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        """Convert to a number from 0 to 1."""
        text = str(value).strip()
        try:
            number = float(text.removesuffix("%"))
            return normalize_threshold(number / 100 if text.endswith("%") else number)
        except (ValueError, UserError):
            self.fail(
                f"{value!r} is not a confidence from 0 to 1, or 10 to 100 as percent; write "
                "0.8, 80 or 80%",
                param,
                ctx,
            )


class Strategy(click.Choice):
    """Parameter type for a strategy, by its name here or in llm-consortium."""

    def __init__(self) -> None:
        super().__init__(STRATEGIES)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Return the strategy's present name."""
        if value == "semantic":
            click.echo(f"warning: {NO_CLUSTERING}", err=True)
        return super().convert(present_strategy(value), param, ctx)


def combine_options(*made: ClickCommand) -> Callable[[ClickCommand], ClickCommand]:
    """Return a decorator that adds options in this order."""

    def decorate(function: ClickCommand) -> ClickCommand:
        for one in reversed(made):
            function = one(function)
        return function

    return decorate


POSITIVE_FLOAT = click.FloatRange(0, min_open=True)
NON_NEGATIVE_INT, POSITIVE_INT, UNIT_FLOAT = (
    click.IntRange(0),
    click.IntRange(1),
    click.FloatRange(0, 1),
)

member_options = combine_options(
    click.option(
        "-m",
        "--model",
        "--models",
        "models",
        multiple=True,
        metavar="MODEL",
        help="A member: NAME, NAME:3 for three answers, NAME,temperature=1,role=critic; "
        "repeatable.",
    ),
    click.option(
        "-n", "--count", type=POSITIVE_INT, help="Default number of answers of each member."
    ),
    click.option(
        "--arbiter",
        "--arbiter-model",
        metavar="MODEL",
        help="Model that judges and synthesizes the answers.",
    ),
    click.option("--fallback", metavar="MODEL", help="Arbiter if the first one fails."),
)

strategy_options = combine_options(
    click.option(
        "--strategy",
        "--judging-method",
        type=Strategy(),
        help="How answers are combined; `strategies` describes each.",
    ),
    click.option(
        "--confidence-threshold",
        type=ConfidenceType(),
        help="Stop at this confidence of the arbiter: 0.8, 80 or 80%.",
    ),
    click.option("--max-iterations", type=POSITIVE_INT, help="Maximum number of iterations."),
    click.option(
        "--min-iterations",
        "--minimum-iterations",
        type=POSITIVE_INT,
        help="Minimum number of iterations.",
    ),
    click.option("--system", metavar="TEXT|FILE", help="System prompt of all models."),
    click.option(
        "--role",
        "roles",
        multiple=True,
        metavar="ROLE",
        help="For strategy roles: a role by name or as text; repeatable.",
    ),
    click.option(
        "--eliminate", type=POSITIVE_INT, help="For elimination: members removed per iteration."
    ),
    click.option("--keep", type=POSITIVE_INT, help="For elimination: minimum number of members."),
    click.option(
        "--similarity",
        type=UNIT_FLOAT,
        help="For vote: similarity from which answers count as equal.",
    ),
    click.option("--quorum", type=POSITIVE_INT, help="Minimum number of members that answer."),
    click.option("--context", type=POSITIVE_INT, metavar="TOKENS", help="Maximum prompt tokens."),
    click.option(
        "--seed", type=NON_NEGATIVE_INT, help="Random seed of sampling and of the order of answers."
    ),
    click.option(
        "--budget", type=POSITIVE_INT, metavar="CALLS", help="Maximum number of calls per question."
    ),
    click.option(
        "--max-cost",
        type=POSITIVE_FLOAT,
        help="Start no iteration beyond this cost, in the prices' currency.",
    ),
)

request_options = combine_options(
    click.option("--temperature", type=click.FloatRange(0), help="Default temperature of members."),
    click.option("--max-tokens", type=POSITIVE_INT, help="Maximum new tokens of an answer."),
    click.option("--timeout", type=POSITIVE_FLOAT, metavar="SECONDS", help="Timeout of an answer."),
)

consortium_option = click.option(
    "--consortium",
    metavar="NAME",
    help="A saved consortium, a preset or a yaml file to start from.",
)

location_options = combine_options(
    click.option("--base", help="Base model of local/ names: an option of conf/model or a folder."),
    click.option("--pool", metavar="FOLDER", help="Folder of the experts of local/ names."),
    click.option("--device", help="Device of local models: cpu, cuda, cuda:1."),
    click.option(
        "--providers", type=click.Path(path_type=Path), help="Yaml file of custom endpoints."
    ),
)


def build_registry(given: Mapping[str, Any]) -> MemberRegistry:
    """Build the registry of models.

    Raises:
        UserError: The file of providers is invalid.
    """
    local = {key: given[key] for key in ("base", "pool", "device") if given.get(key)}
    providers = Providers.load(given["providers"]) if given.get("providers") else None
    return MemberRegistry(providers, **local)


def resolve_config(
    options: Mapping[str, Any], members: MemberRegistry, of_each: Sequence[str] = ("timeout",)
) -> ResolvedConfig:
    """Resolve the options: a saved consortium or a preset, overridden by the options.

    Args:
        options: Options by name.
        members: Registry of model names.
        of_each: Options that become defaults of each model's settings.

    Raises:
        UserError: A value is unknown or invalid.
    """
    if options.get("count") and not options.get("models"):
        raise UserError("--count has no effect without -m; name the members", 2)
    origin = _starting_config(options)
    changes: dict[str, Any] = {
        key: options[key] for key in DIRECT_OPTIONS if options.get(key) is not None
    }
    if options.get("models"):
        count = options.get("count") or 1
        changes["members"] = tuple(
            parse_member(m, members.is_known_name, count) for m in options["models"]
        )
    for key in ("arbiter", "fallback"):
        if options.get(key):
            changes[key] = parse_single_member(key, options[key], members)
    if options.get("roles"):
        changes["roles"] = tuple(options["roles"])
        changes.setdefault("strategy", "roles")
    if options.get("system") is not None:
        changes["system"] = read_text_or_file(options["system"])
    if origin is None:
        if "arbiter" not in changes:
            strategy = changes.get("strategy", "default")
            changes["arbiter"] = default_arbiter(strategy, changes["members"])
        resolved = ResolvedConfig(ConsortiumSettings(**changes), None, "as the options say")
    else:
        resolved = origin._replace(config=replace(origin.config, **changes))
    check_unused_options(options, resolved.config.strategy)
    each = {key: options[key] for key in of_each if options.get(key) is not None}
    return resolved._replace(config=_apply_to_each(resolved.config, each))


def check_unused_options(given: Mapping[str, Any], strategy: str, flag: str = "--") -> None:
    """Check that all options have an effect; an unused threshold only causes a warning.

    Args:
        given: Options by name.
        strategy: The resulting strategy.
        flag: Prefix of option names in messages.

    Raises:
        UserError: An option has no effect.
    """
    for key, required_strategy in (
        ("eliminate", "elimination"),
        ("keep", "elimination"),
        ("similarity", "vote"),
    ):
        if given.get(key) is not None and strategy != required_strategy:
            raise UserError(
                f"{flag}{key} has no effect with strategy {strategy}; add {flag}strategy "
                f"{required_strategy}",
                2,
            )
    if given.get("confidence_threshold") is not None and strategy in UNSURE:
        key = "confidence-threshold" if flag == "--" else "confidence_threshold"
        log.warning(
            "%s%s has no effect with strategy %s, which reports no confidence",
            flag,
            key,
            strategy,
        )


def _starting_config(options: Mapping[str, Any]) -> ResolvedConfig | None:
    """Return the base configuration of the options; `None` if they are complete.

    Raises:
        UserError: They name no models, and a default model or its key is missing.
    """
    if name := options.get("consortium"):
        return ResolvedConfig(load_config(name), name, f"consortium {name}")
    if options.get("models"):
        return None
    classic = read_preset("classic")
    for one in (*classic.members, classic.arbiter):
        try:
            LLM(one.model if one else "").check()
        except UserError as error:
            raise UserError(
                "no models are given: store a key (llm keys set openai) and name them (-m gpt-4o), "
                "or take those of this machine (--consortium local); the default needs llm-"
                f"consortium's four models, and {error}"
            ) from None
    return ResolvedConfig(classic, "classic", "preset classic")


def parse_single_member(option: str, spec: str, members: MemberRegistry) -> MemberSpec:
    """Parse the single model of an option.

    Raises:
        UserError: It has a count above 1.
    """
    found = parse_member(spec, members.is_known_name)
    if found.count > 1:
        raise UserError(f"--{option} {spec}: cannot have several samples; leave the number out", 2)
    return found


def _apply_to_each(config: ConsortiumSettings, each: Mapping[str, Any]) -> ConsortiumSettings:
    """Set defaults for every model without such a setting."""
    if not each:
        return config

    def with_defaults(one: MemberSpec | None) -> MemberSpec | None:
        new = {key: value for key, value in each.items() if one and getattr(one, key) is None}
        return replace(one, **new) if one else None

    members = tuple(one for one in map(with_defaults, config.members) if one)
    return replace(
        config,
        members=members,
        arbiter=with_defaults(config.arbiter),
        fallback=with_defaults(config.fallback),
    )


FILE_NAME_PATTERN = re.compile(r"[\w.~/\\-]*\.(?:txt|md|prompt|yaml|json)")
"""Matches words that must be meant as a file name."""


def read_text_or_file(given: str) -> str | None:
    """Return a text, or the content of the file of this name; blank text is `None`.

    Raises:
        UserError: The file cannot be read.
    """
    try:
        is_file = "\n" not in given and len(given) < 1024 and os.path.isfile(given)
        text = Path(given).read_text(encoding="utf-8") if is_file else given
        if not is_file and FILE_NAME_PATTERN.fullmatch(given):
            raise UserError(
                f"--system {given}: no such file; a prompt given as text needs several words"
            )
    except (OSError, ValueError) as error:
        raise UserError(f"--system {given}: the file cannot be read: {error}") from None
    return text.strip() or None
