"""Positions as coefficients, which vLLM's workers write into the places of adapters."""

import itertools
from typing import Any

import numpy as np

from swarm.engine.vllm.mixing import HostBasis
from swarm.engine.vllm.way import AdapterSync, check_ignored, check_sound, temporary_folder
from swarm.errors import UserError


class SlotSync(AdapterSync):
    """Keeps as many adapters as positions in their places, for good, and has them written over.

    vLLM's prefix cache goes by an adapter's name and path, and each writing gives new ones, so
    cached prompts of other weights stay apart; the number finds the place. Nothing may be evicted
    or put to sleep, since vLLM's own copy of an adapter stays what it was at first.

    Raises:
        UserError: vLLM does not take the experts, or has layers that cannot be written like this.
    """

    def __init__(self, llm: Any, basis: HostBasis, most: int) -> None:
        super().__init__(llm, basis, most)
        self._versions = itertools.count(1)
        units = [(np.arange(basis.count) % basis.rows == row) * 1.0 for row in range(basis.rows)]
        for unit in units:
            with temporary_folder() as folder:
                basis.write_adapter(unit, folder / "expert", "float32")
                llm.collective_rpc("swarm_take", args=(str(folder / "expert"),))
        for problem, ignored in llm.collective_rpc("swarm_hold", args=(basis.starts, basis.shared)):
            check_ignored(ignored)
            if problem:
                raise UserError(f"engine.way=slots: {problem}; choose engine.way=folders")
        self._numbers = list(range(1, most + 1))
        for number in self._numbers:
            self.load_adapter(units[0], number)
            llm.llm_engine.pin_lora(number)

    def sync_positions(self, positions: np.ndarray) -> None:
        """See `Way.bring`."""
        from vllm.lora.request import LoRARequest

        numbers = self._numbers[: len(positions)]
        for problem in self.llm.collective_rpc("swarm_write", args=(numbers, positions.tolist())):
            check_sound(problem)
        version = next(self._versions)
        self.requests = [
            LoRARequest(f"written-{version}-{number}", number, f"written/{version}/{number}")
            for number in numbers
        ]

    def verify_loaded(self) -> None:
        """See `Way.verify`."""
        for problem in self.llm.collective_rpc("swarm_changed"):
            check_sound(problem)
