"""Elites: the best that an earlier run's particles found, as experts of another search."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swarm.adapters import Adapter, read_adapter
from swarm.errors import UserError
from swarm.manifest import verify_run_file
from swarm.places import find_path


@dataclass(frozen=True)
class EliteExperts:
    """The personal bests of the run in the folder `elites`, at most `elite_count` of them."""

    elites: str | None = None
    elite_count: int = 3

    def __post_init__(self) -> None:
        """Raise UserError for settings that can never work."""
        if self.elites is not None and not (isinstance(self.elites, str) and self.elites.strip()):
            raise UserError(
                f"pool.elites must be the folder of a run, as search/NAME, or null, "
                f"not {self.elites!r}"
            )
        if type(self.elite_count) is not int or self.elite_count < 1:
            raise UserError(
                f"pool.elite_count must be a whole number above 0, not {self.elite_count!r}"
            )

    def load_adapters(self, experts: Sequence[str]) -> list[Adapter]:
        """The adapters, best first, named elite_0 and so on.

        Of equal positions the first particle's counts; one that is one of `experts` alone does
        not. Raises UserError where the folder is no run, or has no elite.
        """
        if self.elites is None:
            return []
        run = find_path(self.elites)
        found = [_load_facts(folder) for folder in _find_personal_bests(run)]
        ranked = sorted(found, key=lambda one: (-one["validation_utility"], one["particle"]))
        chosen: dict[str, Path] = {}
        for facts in ranked:
            if not _is_single_expert(facts, experts):
                chosen.setdefault(json.dumps(facts["coefficients"]), facts["folder"])
        if not chosen:
            raise UserError(
                f"pool.elites: all personal bests in {run} are experts of this pool; "
                "choose another run or null"
            )
        folders = list(chosen.values())[: self.elite_count]
        for folder in folders:
            verify_run_file(folder)
        return [replace(read_adapter(one), name=f"elite_{i}") for i, one in enumerate(folders)]


def _find_personal_bests(run: Path) -> list[Path]:
    found = [path.parent for path in run.glob("particle_*/personal_best/swarm.json")]
    if not found:
        raise UserError(
            f"pool.elites: {run} is no run with personal bests (particle_*/personal_best); "
            "give the folder of a search, as search/NAME"
        )
    return found


def _load_facts(folder: Path) -> dict[str, Any]:
    """What a personal best's swarm.json says, with its folder and its particle's number."""
    path = folder / "swarm.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return {
            "coefficients": [float(value) for value in facts["coefficients"]],
            "experts": [str(name) for name in facts["experts"]],
            "validation_utility": float(facts["validation_utility"]),
            "particle": int(re.sub(r"\D", "", folder.parent.name) or 0),
            "folder": folder,
        }
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"pool.elites: {path} does not say what a search found ({error})") from None


def _is_single_expert(facts: dict[str, Any], experts: Sequence[str]) -> bool:
    """Whether a position is one of `experts` alone, in each of its groups."""
    names, values = facts["experts"], facts["coefficients"]
    used = {names[i % len(names)] for i, value in enumerate(values) if value}
    ones = [value for value in values if value]
    whole = ones == [1.0] * (len(values) // max(1, len(names)))
    return whole and len(used) == 1 and used <= set(experts)
