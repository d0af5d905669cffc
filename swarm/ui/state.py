"""What all pages share: the folder of runs, and the models by name."""

import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.errors import UserError
from swarm.runs.run_reader import RUNS_FOLDER
from swarm.ui.launcher import SearchLauncher
from swarm.ui.run_index import RunIndex

if TYPE_CHECKING:
    from swarm.registry.registry import Roster

RUN_NAME_PATTERN = re.compile(r"[^/\\\x00-\x1f]+")


class AppState:
    """Where the page is at home.

    Args:
        folder: Where it was started; searches start there too.
        pool, base, device: Of local names, as `swarm.registry.registry.Roster` has them.
    """

    def __init__(
        self,
        folder: Path,
        pool: str = "initial_experts",
        base: str | None = None,
        device: str | None = None,
    ) -> None:
        self.folder, self.pool, self.base, self.device = folder, pool, base, device

    @property
    def runs_folder(self) -> Path:
        """The folder of runs."""
        return self.folder / RUNS_FOLDER

    @cached_property
    def run_index(self) -> RunIndex:
        """The runs, as lists show them."""
        return RunIndex(self.runs_folder)

    @cached_property
    def launcher(self) -> SearchLauncher:
        """What starts and stops searches."""
        return SearchLauncher()

    @cached_property
    def roster(self) -> "Roster":
        """The models by name; the same ones on every page, so that each is loaded once."""
        from swarm.registry.registry import Roster

        return Roster(base=self.base, pool=self.pool, device=self.device)

    def run_path(self, name: str) -> Path:
        """The folder of a run, which need not be there.

        Args:
            name: Of its folder; of a search that is part of a sweep, the sweep's and its own.

        Raises:
            UserError: The name is no folder's name.
        """
        parts = name.split("/")
        if len(parts) > 2 or not all(
            RUN_NAME_PATTERN.fullmatch(one) and one[0] != "." for one in parts
        ):
            raise UserError(f"{name!r:.80} is no name of a run; allowed: the name of a folder")
        return self.runs_folder / name
