"""EvoGM (Jiang et al. 2026, arXiv 2605.29295, ICML 2026): learnt proposals of coefficients."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from swarm._util.settings import Number, Positive, PositiveNumber, checked
from swarm.optimizers import random_streams
from swarm.optimizers.base import OPTIMIZER_STREAM, Fraction, HistoryOptimizer, Particles

HIDDEN = (128, 256, 256, 256, 128)
"""Widths of a generator's hidden layers, as in the paper."""

DECIMALS = 6
"""Decimals of a proposal; rounding hides machine-dependent last bits of matrix products."""

WEIGHTS_STREAM, BATCHES_STREAM = OPTIMIZER_STREAM + 1, OPTIMIZER_STREAM + 2
"""Purpose ids of the random streams of training, besides those of a population."""


@checked("optimizer")
@dataclass(kw_only=True, eq=False)
class EvolutionaryGenerator(HistoryOptimizer):
    """Trains generators on better and worse vectors of the search to propose better coefficients.

    A search has rounds. A round begins with a population of P vectors over its basis: each basis
    vector alone, their mean and uniform samples from [-1, 1]. Then, T times, the share `winners` of
    all vectors of the round with the highest utilities are winners, the others losers; two
    multilayer perceptrons, F from losers to winners and B back, are trained on them; F maps the
    population to P candidates; and the P best of population and candidates are the next population.
    The basis of the first round is the experts, that of the next one the K best vectors of the
    round before, as models (elites). Every vector over a basis is a position over the experts, so
    no model is built for it.

    The loss is cycle_scale (|B(F(l)) - l|^2 + |F(B(w)) - w|^2) + target_scale |F(l) - m|^2, where l
    and w are losers and winners, equally many, resampled in every epoch, and m is the mean of these
    winners; Adam, one batch per epoch. The last layer is tanh, so coefficients over a basis are in
    [-1, 1].

    Sources: the paper's abstract, a published note on it and the authors' code
    (github.com/JiangTao97/evogm, commit 3c2951e), whose values are the defaults: R = 2 rounds of T
    = 3, which is 7 asks after the first. The note trains generators from scratch in every
    iteration, the code continues training within a round; this follows the code.

    Differences from that code, and choices where it relies on libraries:

    - The state contains vectors and utilities, not weights of the generators: a resumed search
      repeats the training of the round from its history (up to 600 epochs, seconds).
    - Candidates are rounded to 6 decimals.
    - Elites retain their utility at the start of a round, instead of being scored again.
    - A failed evaluation is left out of the history. With fewer than two measured vectors
      candidates are drawn uniformly, and a round with fewer than K measured vectors retains its
      basis.
    - With G groups a generator has G K inputs, and each group has its own elites' coefficients.
    - Initial weights and biases are U(-1, 1) / sqrt(inputs), PyTorch's default.

    State: `basis` [K, G x K]; `members` and `proposals` [P, G x K], vectors over the basis, with
    `member_utilities`; `rows` and `utilities`, everything measured in the round; and `round_ends`,
    the number of rows after each ask.

    Args:
        particles: P; None is 2 K, as in the paper.
        max_iterations: Asks after the first, R (T + 1) - 1.
        inner_iterations: T.
        winners: Share of the round's vectors that are winners.
        cycle_scale: Weight of the cycle loss.
        target_scale: Weight of the loss towards the winners' mean.
        epochs: Training epochs before each proposal.
        learning_rate: Adam's learning rate.
    """

    NAME: ClassVar[str] = "evogm"
    STATE = (
        *HistoryOptimizer.STATE,
        *("basis", "members", "member_utilities", "proposals", "round_ends"),
    )

    particles: Particles | None = 20
    max_iterations: Positive = 7
    inner_iterations: Positive = 3
    winners: Fraction = 0.3
    cycle_scale: Number = 100.0
    target_scale: Number = 1.0
    epochs: Positive = 200
    learning_rate: PositiveNumber = 1e-4

    def _population_size(self, experts: int) -> int:
        return 2 * experts

    def _initial_population(self, experts: int, count: int) -> np.ndarray:
        self.basis = random_streams.expert_positions(experts, self.groups)
        self._start_round(np.full(count, np.nan))
        return self._vectors_to_positions(self.proposals)

    def _start_round(self, utilities: np.ndarray) -> None:
        """Draw a population over the basis: its vectors, their mean, uniform samples.

        Args:
            utilities: [P] of the population, NaN if unknown.
        """
        shape = len(utilities), self.groups * self.experts
        rows = self._iteration_rng().uniform(-1.0, 1.0, shape)
        rows[: self.experts] = random_streams.expert_positions(self.experts, self.groups)
        rows[self.experts : self.experts + 1] = 1 / self.experts
        measured = np.isfinite(utilities)
        self.proposals, self.members, self.member_utilities = rows, rows, utilities
        self.rows, self.utilities = rows[measured], utilities[measured]
        self.round_ends = np.empty(0)
        self._pair: GeneratorPair | None = None

    def _propose_positions(self) -> np.ndarray:
        if self._round_phase():
            self.proposals = self._generate_candidates()
        else:
            # The best vectors of the last round are the new basis; they are not scored again.
            elites = rank_descending(self.utilities)[: self.experts]
            known = np.full(len(self.members), np.nan)
            if len(elites) == self.experts:
                known[: self.experts] = self.utilities[elites]
                self.basis = self._vectors_to_positions(self.rows[elites])
            self._start_round(known)
        return self._vectors_to_positions(self.proposals)[self._proposal_rows(len(self.proposals))]

    def _proposal_rows(self, count: int) -> np.ndarray:
        known = np.isfinite(self.member_utilities) & (self._round_phase() == 0)
        return np.flatnonzero(~known)

    def _update_state(self, utilities: np.ndarray) -> None:
        measured = np.isfinite(utilities)
        self.rows = np.vstack([self.rows, self.proposals[measured]])
        self.utilities = np.append(self.utilities, utilities[measured])
        self.round_ends = np.append(self.round_ends, len(self.rows))
        if self._round_phase() == 0:
            self.member_utilities = np.where(measured, utilities, self.member_utilities)
            return
        everyone = np.vstack([self.members, self.proposals])
        values = np.append(self.member_utilities, utilities)
        best = rank_descending(values)[: len(self.members)]
        self.members, self.member_utilities = everyone[best], values[best]

    def _restore_state(self) -> None:
        super()._restore_state()
        self._pair = None

    def _round_phase(self) -> int:
        """Return 0 for an ask that starts a round, then 1 to T."""
        return self.iteration % (self.inner_iterations + 1)

    def _vectors_to_positions(self, vectors: np.ndarray) -> np.ndarray:
        """Convert vectors [M, G x K] over the basis to positions [M, G x K] over the experts."""
        shape = -1, self.groups, self.experts
        product = np.einsum("mgk,kge->mge", vectors.reshape(shape), self.basis.reshape(shape))
        return product.reshape(len(vectors), -1)

    def _generate_candidates(self) -> np.ndarray:
        """Generate candidates [P, G x K] over the basis from the population with the trained F."""
        if len(self.rows) < 2:
            return self._iteration_rng().uniform(-1.0, 1.0, self.members.shape)
        first = self.iteration - self._round_phase()
        if self._pair is None:
            draw = random_streams.counter_rng(self.seed, first, 0, WEIGHTS_STREAM)
            scales = self.cycle_scale, self.target_scale
            self._pair = GeneratorPair(self.rows.shape[1], draw, *scales, self.learning_rate)
            self._trainings = 0
        # A resumed search repeats the trainings of the round.
        for training in range(self._trainings, len(self.round_ends)):
            end = int(self.round_ends[training])
            order = rank_descending(self.utilities[:end])
            count = max(1, int(end * self.winners))
            good, bad = self.rows[order[:count]], self.rows[order[count:]]
            if len(bad):
                draw = random_streams.counter_rng(self.seed, first + training, 0, BATCHES_STREAM)
                self._pair.train_generators(good, bad, self.epochs, draw)
        self._trainings = len(self.round_ends)
        return np.round(self._pair.improve_vectors(self.members), DECIMALS)


class GeneratorPair:
    """F from losers to winners and B back: perceptrons of `HIDDEN` layers with ReLU and tanh.

    Args:
        width: Inputs and outputs of each.
        draw: Generator of the initial weights.
        cycle_scale, target_scale, learning_rate: See `EvolutionaryGenerator`.
    """

    def __init__(
        self,
        width: int,
        draw: np.random.Generator,
        cycle_scale: float,
        target_scale: float,
        learning_rate: float,
    ) -> None:
        import torch

        self.improve, self.worsen = _perceptron(width, draw), _perceptron(width, draw)
        self._scales = cycle_scale, target_scale
        weights = [*self.improve.parameters(), *self.worsen.parameters()]
        self._adam = torch.optim.Adam(weights, lr=learning_rate)

    def improve_vectors(self, vectors: np.ndarray) -> np.ndarray:
        """Apply F to vectors [M, D]."""
        import torch

        with torch.no_grad():
            return np.asarray(self.improve(torch.from_numpy(np.array(vectors))).numpy())

    def train_generators(
        self, winners: np.ndarray, losers: np.ndarray, epochs: int, draw: np.random.Generator
    ) -> float:
        """Train for `epochs` Adam steps, each on equally many losers [M, D] and winners [L, D].

        Returns:
            The loss before the last step.
        """
        import torch

        count, (cycle, target) = min(len(winners), len(losers)), self._scales
        for _ in range(epochs):
            good, bad = (
                torch.from_numpy(
                    rows[draw.permutation(len(rows))[:count]] if len(rows) > count else rows
                )
                for rows in (winners, losers)
            )
            better, worse = self.improve(bad), self.worsen(good)
            back, forth = self.worsen(better) - bad, self.improve(worse) - good
            loss = cycle * (back.square().mean() + forth.square().mean())
            loss = loss + target * (better - good.mean(0)).square().mean()
            self._adam.zero_grad()
            loss.backward()
            self._adam.step()
        return loss.item()


def _perceptron(width: int, draw: np.random.Generator) -> Any:
    """Return a perceptron in float64; its initial weights do not depend on torch's generator."""
    import torch

    layers: list[Any] = []
    for inputs, outputs in pairwise((width, *HIDDEN, width)):
        layer = torch.nn.Linear(inputs, outputs, dtype=torch.float64)
        for weight in (layer.weight, layer.bias):
            values = draw.uniform(-1.0, 1.0, tuple(weight.shape)) / np.sqrt(inputs)
            weight.data.copy_(torch.from_numpy(values))
        layers += [layer, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1], torch.nn.Tanh())


def rank_descending(utilities: np.ndarray) -> np.ndarray:
    """Return indices by descending utility, unmeasured ones last, ties in order."""
    return np.argsort(-utilities, kind="stable")
