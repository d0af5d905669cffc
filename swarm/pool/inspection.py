"""What a folder of adapters contains, and what a search would do with it, without a base model.

An adapter changes the weight of module m by the update U_m = s_m B_m A_m, with A_m [r, in],
B_m [out, r] and the scaling s_m = alpha / r (alpha / sqrt(r) for rsLoRA). Its updates are compared
as one long vector over all modules, by the Frobenius inner product, without forming U_m, which has
in * out entries. With the cyclic property of the trace,

    <U_i, U_j> = sum_m tr(U_im^T U_jm)
               = sum_m s_im s_jm tr(A_im^T B_im^T B_jm A_jm)
               = sum_m s_im s_jm sum((B_im^T B_jm) * (A_im A_jm^T)),

where both factors of the elementwise product are [r_i, r_j]. Then norm_i = sqrt(<U_i, U_i>) and
cosine_ij = <U_i, U_j> / (norm_i norm_j); a module that only one of the two adapts contributes to
its norm alone. Computed in float64, one module at a time.

Whether an adapter is used is decided by the functions that `swarm.pool.pool.Pool.open` calls.
"""

import json
import math
import shlex
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from swarm._util.files import conf_folder, read_yaml
from swarm._util.terminal import format_table
from swarm.errors import UserError
from swarm.merging.lora_math import gram_matrix
from swarm.pool.adapter import CONFIG_FILE, Adapter, read_adapter
from swarm.pool.discovery import (
    check_compatible,
    find_adapters,
    find_equal_experts,
    find_pool,
    is_missing_folder,
)

HUGE_RATIO = 10
"""Multiple of the median norm from which an update is reported as huge."""

NEAR_COSINE = 0.999
"""Cosine from which two experts are listed as nearly equal: one is a redundant dimension."""


@dataclass
class InspectedExpert:
    """One adapter of the folder.

    Attributes:
        name: Name of its sub-folder.
        ranks, scales: Distinct values over its modules, ascending.
        targets: Last parts of the adapted modules' names -> number of modules.
        base: Base model named in its configuration.
        norm: Frobenius norm of its update over all modules; `None` if it is not used.
        nearest: The expert with the highest cosine, by absolute value; `None` if it is alone.
        cosine: That cosine, from -1 to 1.
        reason: Why the pool refuses it; empty if it is used.
    """

    name: str
    ranks: list[int] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    targets: dict[str, int] = field(default_factory=dict)
    base: str | None = None
    norm: float | None = None
    nearest: str | None = None
    cosine: float | None = None
    reason: str = ""


@dataclass
class PoolInspection:
    """The result of `inspect_folder`.

    Attributes:
        folder: The folder, as given.
        base: The base model that adapters were compared with.
        experts: Every sub-folder that is, or should be, an adapter, by name.
        used: Names of those that a search would use, in the order of `cosines`.
        cosines: Cosines of the used experts' updates, [K, K].
        equal: Groups of used experts with equal weights.
        near: Pairs of other used experts with |cosine| >= `NEAR_COSINE`.
        others: Sub-folders that are no adapters -> why.
    """

    folder: str
    base: str | None
    experts: list[InspectedExpert]
    used: list[str]
    cosines: list[list[float]]
    equal: list[list[str]]
    near: list[list[str]]
    others: dict[str, str]

    @property
    def fault(self) -> str:
        """Return why a search would not accept the folder as it is; empty if it would."""
        refused = sum(bool(one.reason) for one in self.experts)
        if refused:
            return f"it refuses {refused} of {len(self.experts)} adapters"
        few = len(self.used) < 2
        return f"a pool needs at least two experts, and there are {len(self.used)}" if few else ""

    def to_json(self) -> str:
        """Return all fields, `fault` and `ok` as a JSON object; numbers are not rounded."""
        found = {"ok": not self.fault, "fault": self.fault, **asdict(self)}
        return json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False)


def inspect_folder(folder: str | Path, base: str | None = None) -> PoolInspection:
    """Inspect every sub-folder of a pool's folder; reads each weight twice, loads no base model.

    Args:
        folder: A folder as for pool.folder.
        base: Name of the base model; `None`: the one that most adapters name.

    Raises:
        UserError: The folder does not exist, or is itself an adapter.
    """
    path = find_pool(folder)
    if (path / CONFIG_FILE).is_file():
        raise UserError(f"{path} is one adapter; give the folder that contains the adapters")
    experts = {
        name: InspectedExpert(name, reason=wrong) for name, wrong in find_adapters(path).items()
    }
    others = {}
    for other in sorted(path.iterdir()):
        if other.is_dir() and other.name not in experts and not other.name.startswith("."):
            others[other.name] = f"has no {CONFIG_FILE}"
            for deeper in sorted(other.glob(f"*/{CONFIG_FILE}"))[-1:]:
                others[other.name] += f"; an adapter is one level deeper, in {deeper.parent.name}"
    readable = {}
    for name, one in experts.items():
        if one.reason:
            continue
        try:
            adapter = readable[name] = read_adapter(path / name)
        except UserError as error:
            one.reason = str(error).removeprefix(f"{path / name}: ")
            continue
        one.base = adapter.base_model
        one.ranks = sorted({rank for _, _, rank in adapter.shapes.values()})
        one.scales = sorted(set(adapter.scalings.values()))
        one.targets = dict(Counter(module.rpartition(".")[2] for module in adapter.shapes))
    # A folder that is not here names no model, as in a search.
    bases = [one.base_model for one in readable.values() if one.base_model]
    named = Counter(one for one in bases if not is_missing_folder(one))
    wanted = base or next((one for one, _ in named.most_common(1)), None)
    used: list[Adapter] = []
    for name, adapter in readable.items():
        try:
            for module in adapter.shapes:
                adapter.load_factors(module)  # raises if a weight is not finite
            check_compatible([*used, adapter], wanted)
            used.append(adapter)
        except UserError as error:
            experts[name].reason = str(error).removeprefix(f"{adapter.folder}: ")
    names = [one.name for one in used]
    gram = update_gram(used)
    norms = np.sqrt(np.maximum(gram.diagonal(), 0))
    products = np.outer(norms, norms)
    # 0 where an update is zero.
    cosines = np.divide(gram, products, out=np.zeros_like(gram), where=products > 0).clip(-1, 1)
    likeness = np.abs(cosines) - 2 * np.eye(len(used))
    for row, name in enumerate(names):
        experts[name].norm = float(norms[row])
        if len(used) > 1:
            best = int(likeness[row].argmax())
            experts[name].nearest, experts[name].cosine = names[best], float(cosines[row, best])
    equal = find_equal_experts(used)
    pairs = np.argwhere(np.triu(np.abs(cosines), 1) >= NEAR_COSINE).tolist()
    near = [[names[i], names[j]] for i, j in pairs]
    near = [pair for pair in near if not any(set(pair) <= set(group) for group in equal)]
    return PoolInspection(
        str(folder), wanted, list(experts.values()), names, cosines.tolist(), equal, near, others
    )


def update_gram(adapters: Sequence[Adapter]) -> np.ndarray:
    """Return the inner products of the adapters' updates over all modules, [K, K] float64.

    See the module's docstring for the formula. Each weight is read once.
    """
    gram = np.zeros((len(adapters), len(adapters)))
    for module in sorted({module for adapter in adapters for module in adapter.shapes}):
        indices = [i for i, adapter in enumerate(adapters) if module in adapter.shapes]
        factors = [adapters[i].load_factors(module) for i in indices]
        gram[np.ix_(indices, indices)] += gram_matrix(factors)
    return gram


def format_inspection(found: PoolInspection, matrix: bool = False) -> str:
    """Format the result for a terminal: the table, then what needs attention, then the verdict.

    Args:
        found: The result.
        matrix: Whether to add the matrix of cosines.
    """
    base, header, rows = table_of_experts(found)
    lines = [f"base model: {base}", ""] if base and rows else []
    lines += format_table(header, rows) if rows else []
    if matrix and found.used:
        table = [
            [name, *(f"{value:.3f}" for value in row)]
            for name, row in zip(found.used, found.cosines, strict=True)
        ]
        lines += ["", "cosines of the updates:", *format_table(["", *found.used], table)]
    remarks = list_remarks(found)
    lines += [*([""] if lines else []), *remarks, *([""] if remarks else [])]
    words = ["python", "-m", "swarm.search", f"pool={found.folder}"]
    if found.fault:
        words.append(f"pool.experts=[{','.join(found.used)}]")
        lines.append(f"A search would not take this folder: {found.fault}.")
    if found.base and found.base != read_yaml(conf_folder() / "model" / "smollm2.yaml")["path"]:
        words += ["model=local", f"model.path={found.base}"]
    if len(found.used) > 1:
        lines.append(f"{len(found.used)} experts: {shlex.join(words)}")
    return "\n".join(lines)


def table_of_experts(found: PoolInspection) -> tuple[str, list[str], list[list[str]]]:
    """Return the base model, empty if it is a column, the header and one row per adapter."""
    bases = [one.base or "not named" for one in found.experts]
    same = len(set(bases)) == 1
    header = ["adapter", "rank", "scale", "modules", "norm", "nearest (cosine)", "search"]
    rows = []
    for one in found.experts:
        targets = ", ".join(f"{name} x{count}" for name, count in sorted(one.targets.items()))
        rows.append(
            [
                one.name,
                _format_values(one.ranks),
                _format_values(one.scales),
                targets,
                "" if one.norm is None else f"{one.norm:.4g}",
                "" if one.cosine is None else f"{one.nearest} ({one.cosine:.3f})",
                "refuses it" if one.reason else "uses it",
            ]
        )
    if not same:
        for row, base in zip([header, *rows], ["base", *bases], strict=True):
            # The last parts of a long name identify a folder.
            row.insert(4, base if len(base) <= 36 else f"...{base[-33:]}")
    return bases[0] if same else "", header, rows


def _format_values(values: Sequence[float]) -> str:
    if len(values) > 3:
        return f"{values[0]:g} to {values[-1]:g}"
    return ", ".join(f"{value:.4g}" for value in values)


def list_remarks(found: PoolInspection) -> list[str]:
    """Return one line per adapter that is refused, is a double, or changes nothing or a lot."""
    remarks = [f"refused: {one.name}: {one.reason}" for one in found.experts if one.reason]
    remarks += [f"no adapter: {name} {why}" for name, why in found.others.items()]
    remarks += [
        f"doubles: {', '.join(names)} have equal weights; list only one of them in pool.experts"
        for names in found.equal
    ]
    remarks += [
        f"nearly equal: {first} and {second}, |cosine| of {NEAR_COSINE} or more"
        for first, second in found.near
    ]
    norms = {one.name: one.norm for one in found.experts if one.norm is not None}
    positive = [norm for norm in norms.values() if norm]
    median = statistics.median(positive) if len(positive) > 2 else math.inf
    for name, norm in norms.items():
        if math.isclose(norm, 0):
            remarks.append(f"zero: {name} changes nothing, as in an untrained adapter")
        elif norm >= HUGE_RATIO * median:
            remarks.append(
                f"huge: the update of {name} is {norm / median:.0f} times as large as the median; "
                "if it does not work alone either, leave it out by pool.experts"
            )
    return remarks
