"""Conversion of configurations saved by llm-consortium 0.3 to 0.8."""

from collections.abc import Mapping
from typing import Any

from swarm.errors import UserError

RENAMED_KEYS = {
    "models": "members",
    "system_prompt": "system",
    "minimum_iterations": "min_iterations",
}
IGNORED_KEYS = (
    "manual_context",
    "category",
    "expected_agreement",
    "status",
    "created_at",
    "embedding_cache_enabled",
)
"""Settings of a single run or of stored conversations, which have no effect."""
UNSUPPORTED_KEYS = (
    "embedding_backend",
    "embedding_model",
    "clustering_algorithm",
    "cluster_eps",
    "cluster_min_samples",
)
"""Settings of embedding-based clustering, which is not supported."""
LEGACY_KEYS = (*RENAMED_KEYS, *IGNORED_KEYS, *UNSUPPORTED_KEYS, "judging_method", "strategy_params")

LEGACY_STRATEGIES = {"voting": "vote", "role": "roles", "semantic": "default"}
STRATEGY_PARAMETERS: dict[str, tuple[str, type]] = {
    "similarity_threshold": ("similarity", float),
    "eliminate_count": ("eliminate", int),
    "keep_minimum": ("keep", int),
    "roles": ("roles", list),
}


def convert_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Convert settings to the present names; also return a remark on each that is lost.

    Raises:
        UserError: A setting is given under both names, or has the wrong type.
    """
    found = {key: value for key, value in settings.items() if key not in LEGACY_KEYS}
    warnings = [
        f"{key}={settings[key]!r} is ignored: answers are not clustered here"
        for key in UNSUPPORTED_KEYS
        if settings.get(key) is not None
    ]
    for old, new in RENAMED_KEYS.items():
        if old not in settings:
            continue
        if new in settings:
            raise UserError(f"{old} and {new} are the same setting; give one of them")
        found[new] = settings[old]
    if isinstance(members := found.get("members"), Mapping):
        found["members"] = [{"model": name, "count": count} for name, count in members.items()]
    if "system_prompt" in settings and not str(found["system"] or "").strip():
        found["system"] = None
    lowest, highest = found.get("min_iterations"), found.get("max_iterations")
    if (
        "minimum_iterations" in settings
        and type(lowest) is type(highest) is int
        and lowest > highest
    ):
        found["max_iterations"] = lowest
        warnings.append(f"max_iterations={highest} is below minimum_iterations: set to {lowest}")
    warnings += _convert_strategy(found, settings.get("judging_method"))
    warnings += _convert_parameters(found, settings.get("strategy_params"))
    if "models" in settings and found["strategy"] == "elimination":
        warnings += _replace_elimination(found)
    return found, warnings


def _convert_strategy(found: dict[str, Any], judging: Any) -> list[str]:
    """Combine strategy and judging method into one strategy."""
    strategy = found.get("strategy", "default") or "default"
    warnings = []
    if strategy == "semantic":
        warnings.append("strategy=semantic is replaced by default: answers are not clustered here")
    strategy = LEGACY_STRATEGIES.get(str(strategy), strategy)
    if judging not in (None, "default"):
        if strategy == "default":
            strategy = judging
        elif judging != strategy and not (judging == "rank" and strategy == "elimination"):
            warnings.append(
                f"judging_method={judging} is ignored: strategy={strategy} has its own judging"
            )
    found["strategy"] = strategy
    return warnings


def _convert_parameters(found: dict[str, Any], parameters: Any) -> list[str]:
    """Move the strategy's parameters to the settings; numbers are often strings."""
    if parameters and not isinstance(parameters, Mapping):
        raise UserError(f"strategy_params: {parameters!r} is not a mapping")
    warnings = []
    for key, value in (parameters or {}).items():
        name, kind = STRATEGY_PARAMETERS.get(key, ("", str))
        if not name:
            warnings.append(f"strategy_params.{key}={value!r} is ignored: no such setting")
        elif name == "roles":
            found[name] = [value] if isinstance(value, str) else value
        else:
            try:
                found[name] = kind(value)
            except (TypeError, ValueError):
                raise UserError(f"strategy_params.{key}={value!r} is not a number") from None
    return warnings


def _replace_elimination(found: dict[str, Any]) -> list[str]:
    """Replace elimination by ranking if there are too few members to eliminate any."""
    counts = [one.get("count", 1) if isinstance(one, Mapping) else 1 for one in found["members"]]
    keep = found.get("keep", 2)
    if not all(type(count) is int for count in counts) or sum(counts) > keep:
        return []
    found["strategy"] = "rank"
    return [f"strategy=elimination is replaced by rank: {keep} of {sum(counts)} members are kept"]
