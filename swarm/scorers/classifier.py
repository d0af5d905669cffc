"""A text classifier on this machine: a continuation is worth as much as it is not toxic."""

import re
from collections.abc import Mapping, Sequence
from math import exp, isfinite
from typing import Any

from swarm.errors import UserError
from swarm.scorers.local import LocalModel, labels, read_config
from swarm.scorers.toxicity import Untoxic

UNTOXIC = re.compile(r"(not?|non|un)[\W_]*tox")


class Classifier(Untoxic):
    """Scores a text by one minus the probability that it is toxic.

    The model is any text classifier of transformers. Its probabilities are sigmoids where its
    configuration says "multi_label_classification", or where it has one output, else a softmax. A
    text longer than it can read is cut off. What is read of a text, and what one for which the
    model gives no number is worth, is told in `Untoxic`.

    Args:
        model, device, dtype, trust_remote_code, max_tokens: See `LocalModel`; model is its path.
        label: Name or number of the output that means toxic; `None` is the one named "toxic" or
            "toxicity", else the only one whose name contains "tox".
        first_line, short: See `Untoxic`.

    Raises:
        UserError: A value is not allowed.
    """

    def __init__(
        self,
        model: str,
        label: str | int | None = None,
        first_line: bool = True,
        short: float = 0.5,
        device: str | None = None,
        dtype: str = "auto",
        trust_remote_code: bool = False,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(first_line, short)
        self.local = LocalModel(model, device, dtype, trust_remote_code, max_tokens)
        if isinstance(label, bool) or not isinstance(label, (str, int, type(None))):
            raise UserError(f"task.scorer.label={label}: must be null, a name or a number")
        self.label = label

    def check(self) -> None:
        """See `Prepared.check`; a hub model that is not on disk yet is not looked into.

        Raises:
            UserError: There is no such model, it is no classifier, or it has no such label.
        """
        if config := self.local.config():
            self._describe(config)

    def sources(self) -> dict[str, str]:
        """See `swarm.tasks.Sourced`."""
        return self.local.sources()

    def open(self, device: str) -> None:
        """See `Prepared.open`.

        Raises:
            UserError: As `check`, `LocalModel.resolve` and `LocalModel.open`.
        """
        folder = self.local.resolve()
        self._describe(read_config(folder))
        self.local.open(folder, "AutoModelForSequenceClassification", device)

    def _describe(self, config: Mapping[str, Any]) -> None:
        """Read from a configuration which output is meant and how it becomes a probability."""
        named, kind = labels(config), config.get("problem_type")
        if kind == "regression":
            raise UserError(
                f"task.scorer.model={self.local.path} was trained for regression: its outputs are "
                "no probabilities"
            )
        self._output = self._chosen(named)
        self._apart = kind == "multi_label_classification" or len(named) == 1

    def _chosen(self, named: Sequence[str]) -> int:
        """The place of the toxic output."""
        names = [name.lower() for name in named]
        if isinstance(self.label, int):
            found = [i for i in range(len(names)) if i == self.label]
        elif self.label is not None:
            found = [i for i, name in enumerate(names) if name == self.label.lower()]
        else:
            toxic = [i for i, name in enumerate(names) if "tox" in name and not UNTOXIC.match(name)]
            found = [i for i in toxic if names[i] in ("toxic", "toxicity")] or toxic
        if len(found) != 1:
            raise UserError(
                f"task.scorer.label={self.label}: which output of {self.local.path} means toxic? "
                f"Give a name or its number, from 0: {', '.join(named)}"
            )
        return found[0]

    def toxicity(self, texts: Sequence[str]) -> list[float | None]:
        """The probability that each text is toxic; `None` where the model gives no number."""
        limit = self.local.longest()
        rows = [self.local.encode(text, limit=limit) for text in texts]
        return [self._probability(logits) for logits in self.local.logits(rows)]

    def _probability(self, logits: Sequence[float]) -> float | None:
        """The toxic output's share of a softmax, or its sigmoid; `None` of what is no number."""
        if not all(isfinite(x) for x in logits):
            return None
        mine = logits[self._output]
        others = [0.0] if self._apart else [x for i, x in enumerate(logits) if i != self._output]
        return 1.0 / (1.0 + sum(exp(min(x - mine, 700.0)) for x in others))
