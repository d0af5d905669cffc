"""The mixture that the command line asks for: a preset, and over it what was said."""

import os
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from swarm.collab.presets import read_preset
from swarm.errors import UserError
from swarm.moa.arguments import MAX_TOKENS, TEMPERATURE
from swarm.moa.session import ChatOptions
from swarm.models.counts import parse_counted_names
from swarm.models.trace import Replay

DIRECT_OPTIONS = ("strategy", "prompt", "quorum", "seed", "context")
"""Options that a preset has as keys of the same name."""

REQUEST_OPTIONS = ("temperature", "max_tokens", "system", "seed")
"""Options that are no part of a mixture, but of what it is asked."""


class MixtureSettings(NamedTuple):
    """What is to be asked.

    Attributes:
        mixture: As a preset has it.
        asked: Temperature, max_tokens, system and seed of what it is asked.
        origin: Where the mixture comes from, in words.
    """

    mixture: dict[str, Any]
    asked: dict[str, Any]
    origin: str

    @property
    def trace_header(self) -> dict[str, Any]:
        """For the header of a trace; a replay begins with it."""
        return {"preset": self.mixture, "asked": self.asked}

    @property
    def uses_local_models(self) -> bool:
        """Whether a model of this machine may be asked."""
        return _names_local_model(slot["model"] for slot in iterate_slots(self.mixture))

    def with_replayed_models(self, replay: Replay) -> dict[str, Any]:
        """The mixture with the models of a trace, where a fallback is often not met."""
        if fallback := self.mixture.get("fallback"):
            try:
                replay.get_model(fallback["model"])
            except UserError:
                return {**self.mixture, "fallback": None}
        return self.mixture

    def build_chat_options(self, given: Namespace) -> ChatOptions:
        """How a session asks."""
        return ChatOptions(
            **self.asked,
            multi_turn=given.multi_turn is not False,
            json=given.json,
            streamed=not given.no_stream,
            quiet=given.quiet,
        )


def _names_local_model(models: Iterable[str]) -> bool:
    """Whether one of them may be of this machine; what is in a mixture is not known here."""
    return any(name.startswith(("local/", "moa/")) for name in models)


def iterate_slots(mixture: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The proposers, the aggregator, and the fallback where there is one."""
    yield from mixture["proposers"] if mixture.get("layers", 2) > 1 else []
    yield mixture["aggregator"]
    if mixture.get("fallback"):
        yield mixture["fallback"]


def build_settings(given: Namespace, recorded: Mapping[str, Any]) -> MixtureSettings:
    """What the command line comes to.

    Args:
        given: As `swarm.moa.arguments.read` gives it.
        recorded: The header of the trace that is replayed; empty without one.

    Raises:
        UserError: An option has no effect, or there is no such preset.
    """
    mixture, origin = _initial_mixture(given, recorded)
    if pairs := parse_counted_names(given.reference_models or []):
        mixture["proposers"] = [{"model": name, "count": count} for name, count in pairs]
    if given.aggregator:
        mixture["aggregator"] = {**mixture.get("aggregator", {}), "model": given.aggregator}
    if given.fallback:
        mixture["fallback"] = {"model": given.fallback}
    if given.rounds is not None:
        mixture["layers"] = given.rounds + 1
    mixture.update({key: getattr(given, key) for key in DIRECT_OPTIONS if getattr(given, key) is not None})
    _fill_open_slots(mixture, given.aggregator)
    # What the command line says holds for all, whatever the preset says of one of them.
    for slot in iterate_slots(mixture):
        for key in ("temperature", "max_tokens", "timeout"):
            if getattr(given, key) is not None:
                slot[key] = getattr(given, key)
    asked = {"temperature": TEMPERATURE, "max_tokens": MAX_TOKENS, **recorded.get("asked", {})}
    asked.update({key: getattr(given, key) for key in REQUEST_OPTIONS if getattr(given, key) is not None})
    _check_unused_options(given, mixture)
    return MixtureSettings(mixture, asked, origin)


def _initial_mixture(given: Namespace, recorded: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The mixture before the command line has changed it, and where it comes from."""
    if given.preset:
        return read_preset(given.preset), f"preset {given.preset}"
    if "preset" in recorded:
        return dict(recorded["preset"]), f"as in {given.replay}"
    if given.aggregator and given.reference_models:
        return {"proposers": []}, "no preset"
    key = bool(os.environ.get("TOGETHER_API_KEY", "").strip())
    remote = [name for name, _ in parse_counted_names(given.reference_models or []) if not _names_local_model([name])]
    if remote and not key:
        raise UserError(
            f"--aggregator: name the model that makes one answer of those of {', '.join(remote)}; "
            "the default without a key (preset local) is a model of 135 million parameters",
            2,
        )
    name = "together" if key else "local"
    return read_preset(name), f"preset {name}, as TOGETHER_API_KEY is {'' if key else 'not '}set"


def _fill_open_slots(mixture: dict[str, Any], model: str | None) -> None:
    """Give the slots that leave the model open the one that was named.

    Raises:
        UserError: None was.
    """
    for slot in iterate_slots(mixture):
        if slot.get("model") is None and model is None:
            raise UserError("this preset leaves the model to you: name one, --model NAME", 2)
        slot["model"] = slot.get("model") or model


def _check_unused_options(given: Namespace, mixture: Mapping[str, Any]) -> None:
    """See that no option is without effect on this mixture.

    Raises:
        UserError: One is.
    """
    models = [slot["model"] for slot in iterate_slots(mixture)]
    remote = any(not name.startswith(("local/", "function/", "llm/")) for name in models)
    alone = mixture.get("layers", 2) == 1
    calls = "nobody is called in a replay"
    useless = [
        *((name, calls) for name in CALL_OPTIONS if given.replay),
        *((name, "no model here is local/...") for name in LOCAL_OPTIONS if not _names_local_model(models)),
        *((name, "all models here are on this machine") for name in REMOTE_OPTIONS if not remote),
        *((name, "there is no layer of proposers") for name in PROPOSER_OPTIONS if alone),
    ]
    for name, why in useless:
        if getattr(given, name) not in (None, False):
            raise UserError(f"--{name} has no effect: {why}; leave it out", 2)


LOCAL_OPTIONS = ("base", "pool", "device")
REMOTE_OPTIONS = ("num_proc", "providers")
CALL_OPTIONS = (*LOCAL_OPTIONS, *REMOTE_OPTIONS, "timeout", "no_cache")
PROPOSER_OPTIONS = ("reference_models", "quorum", "prompt")
