"""The adapter of a lower rank that is nearest to a result, and what it loses on dev."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hydra.errors import HydraException

from swarm._util.cli import to_user_error
from swarm.errors import UserError
from swarm.evaluation.checkpoints import CheckpointCandidate
from swarm.evaluation.evaluation import Evaluation
from swarm.export.source import ExportSource
from swarm.merging.lora_math import compress_modules
from swarm.pool.adapter import read_adapter, read_routed_adapter, write_adapters
from swarm.pool.discovery import combined_adapter
from swarm.runs.verdict import describe_difference
from swarm.tasks.metrics import paired_gain


def cut_rank(source: ExportSource, rank: int, folder: Path, base: str | None) -> ExportSource:
    """Write a result with at most a rank, by SVD, and return it.

    Its note has "cut": the rank, the relative errors (`compress_modules`), and "dev", a sentence.

    Args:
        folder: A new one.
        base: As of `ExportSource.load_base`.

    Raises:
        UserError: No rank is above.
    """
    if rank >= (highest := source.max_rank()):
        raise UserError(f"rank={rank}: {source.folder} has rank {highest}; give less, or omit it")
    adapters, errors = [], []
    for adapter in map(read_adapter, source.adapter_folders):
        exact = ((module, adapter.load_factors(module)) for module in adapter.shapes)
        pairs, error = compress_modules(exact, rank)
        adapters.append(combined_adapter([adapter], pairs, source.base_name))
        errors.append(error)
    routed = read_routed_adapter(source.folder)
    write_adapters(folder, adapters, source.note, routed[0] if routed else None)
    try:
        measured = measure_cut(source, folder, base)
    except (UserError, HydraException) as error:
        measured = f"not measured on dev: {to_user_error(error)}"
    worst = max(errors, key=lambda error: error["overall"])
    cut = {"rank": rank, "error": worst, "dev": measured}
    return replace(source, folder=folder, note={**source.note, "cut": cut})


def measure_cut(source: ExportSource, folder: Path, base: str | None) -> str:
    """Return the utilities of a result and of its cut adapters on dev, and the difference.

    Raises:
        UserError: There is no task, or it cannot be evaluated here.
    """
    from hydra.utils import instantiate

    config = source.config.get("task") or {}
    if "_target_" not in config:
        raise UserError(f"{source.name} has no configuration of a task")
    task = instantiate(config, _convert_="all")
    if task.chat == "auto":
        task.chat = source.note.get("prompt_form") == "chat"
    places = [str(source.folder), str(folder)]
    candidate = CheckpointCandidate(source.load_base(base), places, ["exact", "cut"])
    candidate.scale = source.state.get("scale")
    evaluation = Evaluation(task, candidate, "dev")
    before, after = (voice["utility"] for voice in evaluation.run()["voices"])
    assert evaluation.found
    exact, cut = evaluation.found.scores
    gain = paired_gain(task.metric_task, cut, exact)
    difference = describe_difference(gain, "dev items", task.metric_task.highest == 1.0)
    return f"{after:.3f} on dev, {before:.3f} before; {difference}"


def describe_cut(cut: dict[str, object]) -> Sequence[str]:
    """Return a cut in words."""
    error = cut["error"]["overall"]  # type: ignore[index]
    return [
        f"cut to rank {cut['rank']} by SVD, an error of {error:.2g} of the norm",
        str(cut["dev"]),
    ]
