"""A text classifier on this machine: a continuation is worth as much as it is not toxic."""

import re
from collections.abc import Mapping, Sequence
from math import exp, isfinite
from typing import Any

from swarm.errors import UserError
from swarm.scorers.local import ScoringModel, label_names, read_config
from swarm.scorers.toxicity import NonToxicity

NON_TOXIC_LABEL = re.compile(r"(not?|non|un)[\W_]*tox")


class ToxicityClassifier(NonToxicity):
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
        self.local = ScoringModel(model, device, dtype, trust_remote_code, max_tokens)
        if isinstance(label, bool) or not isinstance(label, (str, int, type(None))):
            raise UserError(f"task.scorer.label={label}: must be null, a name or a number")
        self.label = label

    def check(self) -> None:
        """See `Prepared.check`; a hub model that is not on disk yet is not looked into.

        Raises:
            UserError: There is no such model, it is no classifier, or it has no such label.
        """
        if config := self.local.load_config():
            self._read_output_config(config)

    def source_digests(self) -> dict[str, str]:
        """See `swarm.tasks.Sourced`."""
        return self.local.source_digests()

    def open(self, device: str) -> None:
        """See `Prepared.open`.

        Raises:
            UserError: As `check`, `LocalModel.resolve` and `LocalModel.open`.
        """
        folder = self.local.resolve_folder()
        self._read_output_config(read_config(folder))
        self.local.open(folder, "AutoModelForSequenceClassification", device)

    def _read_output_config(self, config: Mapping[str, Any]) -> None:
        """Read from a configuration which output is meant and how it becomes a probability."""
        named, kind = label_names(config), config.get("problem_type")
        if kind == "regression":
            raise UserError(
                f"task.scorer.model={self.local.path} was trained for regression: its outputs are "
                "no probabilities"
            )
        self._output = self._toxic_output(named)
        self._apart = kind == "multi_label_classification" or len(named) == 1

    def _toxic_output(self, named: Sequence[str]) -> int:
        """The place of the toxic output."""
        names = [name.lower() for name in named]
        if isinstance(self.label, int):
            found = [i for i in range(len(names)) if i == self.label]
        elif self.label is not None:
            found = [i for i, name in enumerate(names) if name == self.label.lower()]
        else:
            toxic = [i for i, name in enumerate(names) if "tox" in name and not NON_TOXIC_LABEL.match(name)]
            found = [i for i in toxic if names[i] in ("toxic", "toxicity")] or toxic
        if len(found) != 1:
            raise UserError(
                f"task.scorer.label={self.label}: which output of {self.local.path} means toxic? "
                f"Give a name or its number, from 0: {', '.join(named)}"
            )
        return found[0]

    def measure_toxicity(self, texts: Sequence[str]) -> list[float | None]:
        """The probability that each text is toxic; `None` where the model gives no number."""
        limit = self.local.max_input_tokens()
        rows = [self.local.encode(text, limit=limit) for text in texts]
        return [self._toxic_probability(logits) for logits in self.local.compute_logits(rows)]

    def _toxic_probability(self, logits: Sequence[float]) -> float | None:
        """The toxic output's share of a softmax, or its sigmoid; `None` of what is no number."""
        if not all(isfinite(x) for x in logits):
            return None
        mine = logits[self._output]
        others = [0.0] if self._apart else [x for i, x in enumerate(logits) if i != self._output]
        return 1.0 / (1.0 + sum(exp(min(x - mine, 700.0)) for x in others))
