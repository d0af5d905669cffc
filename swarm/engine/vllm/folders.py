"""Positions as adapters in folders, vLLM's own way in."""

import itertools
from typing import Any

import numpy as np

from swarm.engine.vllm.mixing import HostBasis
from swarm.engine.vllm.way import AdapterSync, check_sound


class FolderSync(AdapterSync):
    """Writes each position as an adapter, has vLLM load it, and removes the folder at once.

    No name or number comes twice in the life of an engine: vLLM's prefix cache goes by the name,
    its loaded adapters go by the number.
    """

    def __init__(self, llm: Any, basis: HostBasis, most: int) -> None:
        super().__init__(llm, basis, most)
        self._numbers = itertools.count(1)

    def sync_positions(self, positions: np.ndarray) -> None:
        """See `Way.bring`."""
        while self.requests:
            self.llm.llm_engine.remove_lora(self.requests.pop().lora_int_id)
        for position in positions:
            self.requests.append(self.load_adapter(position, next(self._numbers)))

    def verify_loaded(self) -> None:
        """See `Way.verify`."""
        gone = {one.lora_int_id for one in self.requests} - self.llm.llm_engine.list_loras()
        check_sound(f"vLLM has dropped {len(gone)} adapters of a job under way" if gone else "")
