"""EvoGM (Jiang et al. 2026, arXiv 2605.29295, ICML 2026): learnt proposals of coefficients."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np

from swarm._util.settings import Number, Positive, PositiveNumber, checked
from swarm.optimizers import random_streams
from swarm.optimizers.base import OPTIMIZER_STREAM, Fraction, Optimizer, Particles, float_arrays

HIDDEN = (128, 256, 256, 256, 128)
"""Widths of a generator's hidden layers, as in the paper."""

DECIMALS = 6
"""Decimals of a proposal; rounding hides machine-dependent last bits of matrix products."""

WEIGHTS, BATCHES = OPTIMIZER_STREAM + 1, OPTIMIZER_STREAM + 2
"""Purpose ids of the random streams of training, besides those of a population."""


@checked("optimizer")
@dataclass(kw_only=True, eq=False)
class EvolutionaryGenerator(Optimizer):
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
    ARRAYS: ClassVar[dict[str, type]] = float_arrays(
        "basis", "members", "member_utilities", "proposals", "rows", "utilities", "round_ends"
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

    def _reset_history(self) -> None:
        """Start the history of a round."""
        self.rows = np.empty((0, self.groups * self.experts))
        self.utilities, self.round_ends = np.empty(0), np.empty(0)
        self._pair: GeneratorPair | None = None

    def _initial_population(self, experts: int, count: int) -> np.ndarray:
        self.basis = random_streams.expert_positions(experts, self.groups)
        self._reset_history()
        self.proposals = self._draw_population(count)
        self.members, self.member_utilities = self.proposals, np.full(count, np.nan)
        return self._vectors_to_positions(self.proposals)

    def _propose_positions(self) -> np.ndarray:
        if self._round_phase():
            self.proposals = self._generate_candidates()
        else:
            self._start_round()
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
            known = np.where(measured, utilities, self.member_utilities)
            self.member_utilities = known
            return
        everyone = np.vstack([self.members, self.proposals])
        values = np.append(self.member_utilities, utilities)
        best = rank_descending(values)[: len(self.members)]
        self.members, self.member_utilities = (
            everyone[best],
            values[best],
        )

    def _restore_state(self) -> None:
        self.rows = self.rows.reshape(-1, self.positions.shape[1])
        self._pair = None

    def _round_phase(self) -> int:
        """Return 0 for an ask that starts a round, then 1 to T."""
        return self.iteration % (self.inner_iterations + 1)

    def _start_round(self) -> None:
        """Make the best vectors of the last round the new basis, and draw a population over it."""
        elites = rank_descending(self.utilities)[: self.experts]
        known = np.full(len(self.members), np.nan)
        if len(elites) == self.experts:
            known[: self.experts] = self.utilities[elites]
            self.basis = self._vectors_to_positions(self.rows[elites])
        self._reset_history()
        self.proposals = self.members = self._draw_population(len(self.members))
        self.member_utilities = known
        measured = np.isfinite(known)
        self.rows, self.utilities = (
            self.members[measured],
            known[measured],
        )

    def _draw_population(self, count: int) -> np.ndarray:
        """Return vectors [count, G x K] that start a round: basis, its mean, uniform samples."""
        rows = self._iteration_rng().uniform(-1.0, 1.0, (count, self.groups * self.experts))
        rows[: self.experts] = random_streams.expert_positions(self.experts, self.groups)
        rows[self.experts : self.experts + 1] = 1 / self.experts
        return rows

    def _vectors_to_positions(self, vectors: np.ndarray) -> np.ndarray:
        """Convert vectors [M, G x K] over the basis to positions [M, G x K] over the experts."""
        shape = -1, self.groups, self.experts
        product = np.einsum("mgk,kge->mge", vectors.reshape(shape), self.basis.reshape(shape))
        return product.reshape(len(vectors), -1)

    def _generate_candidates(self) -> np.ndarray:
        """Generate candidates [P, G x K] over the basis from the population with the trained F."""
        if len(self.rows) < 2:
            return self._iteration_rng().uniform(-1.0, 1.0, self.members.shape)
        return np.round(self._trained_generators().improve_vectors(self.members), DECIMALS)

    def _trained_generators(self) -> "GeneratorPair":
        """Return the round's generators, completing their training if necessary."""
        first = self.iteration - self._round_phase()
        if self._pair is None:
            draw = random_streams.counter_rng(self.seed, first, 0, WEIGHTS)
            scales = self.cycle_scale, self.target_scale
            self._pair = GeneratorPair(self.rows.shape[1], draw, *scales, self.learning_rate)
            self._trainings = 0
        for training in range(self._trainings, len(self.round_ends)):
            end = int(self.round_ends[training])
            order = rank_descending(self.utilities[:end])
            count = max(1, int(end * self.winners))
            good, bad = self.rows[order[:count]], self.rows[order[count:]]
            if len(bad):
                batches = random_streams.counter_rng(self.seed, first + training, 0, BATCHES)
                self._pair.train_generators(good, bad, self.epochs, batches)
            self._trainings += 1
        return self._pair


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
        self.winner_generator, self.loser_generator = (
            Perceptron(width, draw),
            Perceptron(width, draw),
        )
        self._scales = cycle_scale, target_scale
        self._rate, self._steps = learning_rate, 0
        weights = self.winner_generator.weights + self.loser_generator.weights
        self._moments = [(np.zeros_like(one), np.zeros_like(one)) for one in weights]

    def improve_vectors(self, vectors: np.ndarray) -> np.ndarray:
        """Apply F to vectors [M, D]."""
        return self.winner_generator.forward(vectors)[-1]

    def train_generators(
        self, winners: np.ndarray, losers: np.ndarray, epochs: int, draw: np.random.Generator
    ) -> None:
        """Train for `epochs` Adam steps, each on equally many losers [M, D] and winners [L, D]."""
        count = min(len(winners), len(losers))
        for _ in range(epochs):
            good, bad = (
                rows if len(rows) == count else rows[draw.permutation(len(rows))[:count]]
                for rows in (winners, losers)
            )
            self._adam_step(self.compute_gradients(good, bad)[1])

    def compute_gradients(
        self, winners: np.ndarray, losers: np.ndarray
    ) -> tuple[float, list[np.ndarray]]:
        """Return the loss on winners and losers [M, D], and its gradients for the weights."""
        cycle, target = self._scales
        better = self.winner_generator.forward(losers)
        losers_again = self.loser_generator.forward(better[-1])
        worse = self.loser_generator.forward(winners)
        winners_again = self.winner_generator.forward(worse[-1])
        error_l, error_w = losers_again[-1] - losers, winners_again[-1] - winners
        error_t = better[-1] - winners.mean(axis=0)
        loss = cycle * ((error_l**2).mean() + (error_w**2).mean()) + target * (error_t**2).mean()
        each = 2 / losers.size
        back_l, by_better = self.loser_generator.backward(losers_again, cycle * each * error_l)
        forth_l, _ = self.winner_generator.backward(better, by_better + target * each * error_t)
        forth_w, by_worse = self.winner_generator.backward(winners_again, cycle * each * error_w)
        back_w, _ = self.loser_generator.backward(worse, by_worse)
        forth = [one + two for one, two in zip(forth_l, forth_w, strict=True)]
        gradients = [one + two for one, two in zip(back_l, back_w, strict=True)]
        return float(loss), forth + gradients

    def _adam_step(self, gradients: Sequence[np.ndarray]) -> None:
        """Take an Adam step (Kingma and Ba 2015, arXiv 1412.6980), overwriting the gradients."""
        self._steps += 1
        scales = 1 - 0.9**self._steps, 1 - 0.999**self._steps
        weights = self.winner_generator.weights + self.loser_generator.weights
        # In place: the moments are larger than the batches, and memory traffic dominates the time.
        for weight, gradient, (mean, square) in zip(weights, gradients, self._moments, strict=True):
            mean *= 0.9
            mean += 0.1 * gradient
            square *= 0.999
            gradient *= gradient
            gradient *= 0.001
            square += gradient
            np.sqrt(np.divide(square, scales[1], out=gradient), out=gradient)
            gradient += 1e-8
            np.divide(mean, gradient, out=gradient)
            gradient *= self._rate / scales[0]
            weight -= gradient


class Perceptron:
    """Layers of `HIDDEN` widths with ReLU between them and tanh at the end.

    `weights` alternates the matrix [inputs, outputs] and the bias [outputs] of each layer.
    """

    def __init__(self, width: int, draw: np.random.Generator) -> None:
        sizes = (width, *HIDDEN, width)
        self.weights: list[np.ndarray] = []
        for inputs, outputs in pairwise(sizes):
            for shape in ((inputs, outputs), (outputs,)):
                self.weights.append(draw.uniform(-1.0, 1.0, shape) / np.sqrt(inputs))

    def forward(self, inputs: np.ndarray) -> list[np.ndarray]:
        """Return the inputs [M, D] and the outputs of every layer."""
        outputs, last = [inputs], len(self.weights) // 2 - 1
        for layer in range(last + 1):
            matrix, bias = self.weights[2 * layer : 2 * layer + 2]
            sums = outputs[-1] @ matrix + bias
            outputs.append(np.tanh(sums) if layer == last else np.maximum(sums, 0.0))
        return outputs

    def backward(
        self, outputs: Sequence[np.ndarray], gradient: np.ndarray
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the gradients of the weights and of the inputs, given that of the last output."""
        found: list[np.ndarray] = []
        gradient = gradient * (1 - outputs[-1] ** 2)
        for layer in reversed(range(len(outputs) - 1)):
            found[:0] = [outputs[layer].T @ gradient, gradient.sum(axis=0)]
            gradient = gradient @ self.weights[2 * layer].T
            if layer:
                gradient = gradient * (outputs[layer] > 0)
        return found, gradient


def rank_descending(utilities: np.ndarray) -> np.ndarray:
    """Return indices by descending utility, unmeasured ones last, ties in order."""
    return np.argsort(-utilities, kind="stable")
