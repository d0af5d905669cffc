"""A base model without experts, as a model of its own: a judge on this machine, say."""

from collections.abc import Sequence

import numpy as np

from swarm.engine.base import BaseModel
from swarm.engine.device import validate_device
from swarm.engine.hf import HFEngine
from swarm.engine.tokens import encode_prompt
from swarm.models import Completion, Message, Request


class HFModel:
    """Answers with a transformers model, turns through its chat template; greedily, if nothing else
    is asked for. For models by name that share what is in memory see `swarm.roster.local`.

    Args:
        base: The model; its weights are read from safetensors only.
        device: "cpu", "cuda" or "cuda:1"; `None` is where the worker's own model lives.
        max_tokens: See `swarm.engine.hf.HFEngine`.

    Raises:
        UserError: A value is not allowed.
    """

    def __init__(
        self, base: BaseModel, device: str | None = None, max_tokens: int | None = None
    ) -> None:
        self.base = base
        self.device = validate_device(device)
        self._engine = HFEngine("swap", max_tokens)

    def check(self) -> None:
        """Look for the model on this machine; see `swarm.tasks.Prepared.check`.

        Raises:
            UserError: There is no such folder, or it holds no model, or one without a chat
                template.
        """
        if folder := self.base.on_disk():
            encode_prompt(self.base.load_tokenizer(folder), (Message("user", "?"),))

    def fingerprint(self) -> str:
        """See `Base.fingerprint`."""
        return self.base.fingerprint()

    def open(self, device: str) -> None:
        """Load the model; see `swarm.tasks.Prepared.open`.

        Raises:
            UserError: As `Base.load`.
        """
        self._engine.load_base(self.base, self.device or device, {}, "")

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer all requests; see `swarm.models.Model.generate`.

        Raises:
            UserError: One is too long for the model, or asks for what is not allowed.
        """
        asked = [self._engine.clip_to_context(request) for request in requests]
        return self._engine.generate(np.zeros((1, 0)), [asked])[0] if asked else []
