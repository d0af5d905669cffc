"""What a run folder tells of its rounds in forms for others: the original's scratchpad, a vote."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swarm.files import write_atomic

EXACT_ERROR = 1e-6
"""A relative error of saved weights up to here is float32's rounding."""


def reconstruction_error(folder: Path) -> dict[str, float]:
    """How far a run's saved best is from what was measured, if it was cut to be saved."""
    try:
        facts = json.loads((folder / "global_best" / "swarm.json").read_text())
    except (OSError, ValueError):
        return {}
    error = facts.get("reconstruction_error", {}).get("overall", 0.0)
    return {"reconstruction_error": error} if error > EXACT_ERROR else {}


def write_ensemble_yaml(folder: Path, metrics: Mapping[str, Any]) -> None:
    """Write ensemble.yaml, which `python -m swarm.evaluate` runs as a model; without a vote, none.

    Args:
        folder: The run's.
        metrics: As `swarm.verdict.judge` makes them.
    """
    import yaml

    if "ensemble_members" not in metrics:
        (folder / "ensemble.yaml").unlink(missing_ok=True)
        return
    members = [
        {"folder": f"particle_{one['particle']}/personal_best", "utility": one["utility"]}
        for one in metrics["ensemble_members"]
    ]
    content = {"rule": "majority", "members": members}
    head = "# The vote of the best personal bests; how many was chosen on dev.\n"
    text = head + yaml.safe_dump(content, sort_keys=False)
    write_atomic(folder / "ensemble.yaml", text.encode())


def build_scratchpad(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The utilities of a run under the names that the original's users know.

    A particle without a utility in a round (not evaluated, or stopped before the last item) keeps
    its last one in its history.
    """
    count = len(rounds[0]["utilities"]) if rounds else 0
    histories: list[list[float | None]] = [[] for _ in range(count)]
    best_so_far: list[float | None] = []
    measured: list[float] = []
    for entry in rounds:
        for history, utility in zip(histories, entry["utilities"], strict=True):
            history.append(utility if utility is not None or not history else history[-1])
            if utility is not None:
                measured.append(utility)
        best_so_far.append(max(measured, default=None))
    pad: dict[str, Any] = {
        "g": best_so_far[-1] if rounds else None,
        "g_worst": min(measured, default=None),
        "g_history": best_so_far,
    }
    for i, history in enumerate(histories):
        pad[f"particle_{i}_now"] = history[-1]
        pad[f"particle_{i}_best"] = max((u for u in history if u is not None), default=None)
        pad[f"particle_{i}_history"] = history
    return pad
