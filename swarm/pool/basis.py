"""The basis that positions are vectors over: K rows at the modules of one base model, in G groups.

A position is G * K coefficients, group by group; each module is combined with its own group's K.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from swarm.errors import UserError
from swarm.merging import lora_math
from swarm.pool.module_groups import divide_modules
from swarm.pool.synthetic_rows import PoolRow

if TYPE_CHECKING:
    from torch import Tensor

    from swarm.merging.lora_math import FactorPair, WeightedFactors


SPACES = ("factor", "delta")


def check_space(space: str, export_rank: int | None) -> None:
    """Raise UserError for invalid values of pool.space and pool.export_rank."""
    if space not in SPACES:
        raise UserError(f"pool.space is {space!r}; allowed: {', '.join(SPACES)}")
    if export_rank is None:
        return
    if type(export_rank) is not int or export_rank < 1:
        raise UserError(f"pool.export_rank must be null or a positive integer, not {export_rank!r}")
    if space != "delta":
        raise UserError(
            f"pool.export_rank={export_rank} needs pool.space=delta; with pool.space={space} a "
            "combination has the rank of its experts, so use null"
        )


class Basis:
    """The arithmetic of an opened pool.

    Args:
        rows: The K rows.
        shapes: (in, out) of every module that any of them changes.
        space: "factor" combines A and B separately, "delta" their products.
        division: See `swarm.pool.module_groups.divide_modules`.

    Attributes:
        names: Names of the rows.
        groups: The names of the G groups.
        modules: (in, out, rank) of every module, sorted by name, where the rank is that of a
            combination: in the factor space the highest of any row, to which all others are padded
            with zeros, in the delta space the sum of all rows' at that module.
    """

    def __init__(
        self,
        rows: Sequence[PoolRow],
        shapes: Mapping[str, tuple[int, int]],
        space: str,
        division: int | str,
    ) -> None:
        self.rows, self.space = list(rows), space
        self.names = [row.name for row in rows]
        ranks = {
            name: [row.shapes[name][2] for row in rows if name in row.shapes]
            for name in sorted(shapes)
        }
        highest = max(rank for found in ranks.values() for rank in found)
        self.modules = {
            name: (*shapes[name], highest if space == "factor" else sum(found))
            for name, found in ranks.items()
        }
        self.groups, self._group = divide_modules(list(self.modules), division)

    def combine_module(
        self, module: str, vector: Sequence[float], folded: bool = True
    ) -> "FactorPair":
        """Return A and B of `module` at a position [G * K], float64.

        The scaling is in B if `folded`. Summed in the order of the rows, so the result does not
        depend on threads or machines.
        """
        start = self._group[module] * len(self.rows)
        return self._combine_group(module, vector[start : start + len(self.rows)], folded)

    def stack_experts(self, module: str) -> "FactorPair":
        """Return A [K, rank, in] and B [K, out, rank] of `module`, float32, padded and scaled."""
        import torch

        pairs = [self._combine_group(module, row) for row in torch.eye(len(self.rows)).tolist()]
        rank = max(len(a) for a, _ in pairs)
        wide = [lora_math.pad_rank(pair, rank) for pair in pairs]
        return torch.stack([a.float() for a, _ in wide]), torch.stack([b.float() for _, b in wide])

    def expert_factors(self, module: str) -> tuple["Tensor", "Tensor", "Tensor"]:
        """Return the tensors of `module` for an engine, float32: A, B and coefficient indices.

        The third tensor contains, for each entry of A's first axis, the index of its coefficient in
        a position [G * K]. In the factor space A is [K, rank, in] and B [K, out, rank]; in the
        delta space A is [R, in] and B [out, R] of all rows concatenated, with R the sum of their
        ranks.
        """
        import torch

        start = self._group[module] * len(self.rows)
        if self.space == "factor":
            return *self.stack_experts(module), torch.arange(start, start + len(self.rows))
        ranks = [row.shapes[module][2] if module in row.shapes else 0 for row in self.rows]
        a, b = self._combine_group(module, [1.0] * len(self.rows))
        row_indices = torch.arange(start, start + len(self.rows)).repeat_interleave(
            torch.tensor(ranks)
        )
        return a.float(), b.float(), row_indices

    def _combine_group(
        self, module: str, part: Sequence[float], folded: bool = True
    ) -> "FactorPair":
        """Return A and B of one module with the K coefficients of its group."""
        inputs, outputs, rank = self.modules[module]
        terms = self._expert_terms(module, part, folded)
        if self.space == "factor":
            return lora_math.sum_factors(terms, inputs, outputs, rank)
        return lora_math.concatenate_factors(terms, inputs, outputs)

    def _expert_terms(
        self, module: str, part: Sequence[float], folded: bool
    ) -> "Iterator[WeightedFactors]":
        for coefficient, row in zip(part, self.rows, strict=True):
            if coefficient != 0.0 and module in row.shapes:
                a, b = row.load_factors(module)
                scale = row.lora_scaling(module) if folded else 1.0
                yield coefficient, a.double(), b.double() * scale
