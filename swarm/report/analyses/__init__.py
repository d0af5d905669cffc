"""The paper's analyses of run folders: as text, JSON and charts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swarm.errors import UserError
from swarm.report.analyses import emergence, prompt_efficiency, trajectories
from swarm.report.analyses import trajectories as origins
from swarm.report.charts import render_image
from swarm.report.document import Chart, Series
from swarm.runs.folder import RunFolder


def analyse_runs(folders: Sequence[str | Path]) -> dict[str, Any]:
    """Run every analysis on every folder.

    Raises:
        UserError: A folder contains no search, or one without an iteration.
    """
    runs = [RunFolder(folder) for folder in folders]
    started = [origins.rank_of_origin(run) for run in runs]
    return {
        "runs": [
            {
                "run": str(run.path),
                "iterations": len(run.rounds) - 1,
                "finished": run.finished,
                "emergence": emergence.measure_emergence(run),
                "origin": begun,
                "trajectory": trajectories.measure_trajectory(run),
                "economy": prompt_efficiency.measure_economy(run),
            }
            for run, begun in zip(runs, started, strict=True)
        ],
        "origins": origins.summarize_origins(started),
    }


def as_text(found: dict[str, Any]) -> str:
    """Format the result of `analyse_runs` as Markdown, 80 columns wide."""
    sections: list[str] = []
    for one in found["runs"]:
        state = one["finished"] or "still running"
        sections += [f"# {one['run']}: {one['iterations']} iterations, {state}", ""]
        sections += [
            "## Correctness emergence",
            "",
            *emergence.format_emergence(one["emergence"]),
            "",
        ]
        sections += ["## Trajectories", "", *trajectories.format_trajectory(one["trajectory"]), ""]
    if len(found["runs"]) > 1:
        sections += [f"# All {len(found['runs'])} runs", ""]
    sections += [
        "## Rank of origin",
        "",
        *origins.format_origins([one["origin"] for one in found["runs"]]),
        "",
    ]
    sections += [
        "## Economy",
        "",
        *prompt_efficiency.format_economy([one["economy"] for one in found["runs"]]),
    ]
    return "\n".join(sections)


def as_json(found: Any) -> str:
    """Format the result of `analyse_runs` as JSON, with `null` for NaN and infinity."""
    return json.dumps(_to_plain_json(found), indent=1, allow_nan=False, ensure_ascii=False)


def _to_plain_json(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: _to_plain_json(one) for key, one in value.items()}
    return [_to_plain_json(one) for one in value] if isinstance(value, list | tuple) else value


def draw_charts(found: dict[str, Any], folder: Path) -> list[Path]:
    """Write the charts to a folder: economy.svg, and two per run.

    Raises:
        UserError: The folder cannot be written.
    """
    pictures = {"economy": _economy_chart([one["economy"] for one in found["runs"]])}
    names = [Path(one["run"]).name for one in found["runs"]]
    for number, (name, one) in enumerate(zip(names, found["runs"], strict=True), 1):
        if names.count(name) > 1:
            name = f"{number}_{name}"
        pictures[f"{name}_coefficients"] = _coefficient_chart(one["trajectory"])
        pictures[f"{name}_principal"] = _component_chart(one["trajectory"])
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            paths.append(folder / f"{name}.svg")
            paths[-1].write_bytes(render_image(picture, "svg"))
    except OSError as error:
        raise UserError(f"--plots {folder}: {error.strerror}; name a folder to write to") from None
    return paths


def _economy_chart(runs: Sequence[dict[str, Any]]) -> Chart:
    series = [Series(one["run"], one["prompts"], one["best"], "steps") for one in runs]
    return Chart("economy", "Gain by prompts", "prompts on dev", "best so far", series)


def _coefficient_chart(found: dict[str, Any]) -> Chart:
    """Plot the best's coefficients as steps: each best holds until it is improved."""
    bests, last = found["best"], len(found["utility"]) - 1
    x = [*(one["iteration"] for one in bests), last]
    series = [
        Series(name, x, [one["position"][k] for one in [*bests, bests[-1]]], "steps")
        for k, name in enumerate(found["experts"])
    ]
    return Chart(
        "coefficients",
        "The best's coefficients",
        "iteration",
        "coefficient",
        series,
        integer_x=True,
    )


def _component_chart(found: dict[str, Any]) -> Chart:
    points = found["points"]
    series = [
        Series(f"particle {i}", points[:, i, 0], points[:, i, -1]) for i in range(points.shape[1])
    ]
    names = [f"component {n + 1} ({share:.0%})" for n, share in enumerate(found["explained"])]
    return Chart("principal", "Paths of all particles", names[0], names[-1], series)
