"""State that all pages share: run folder, search launcher and models."""

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
    """State that all pages share.

    Args:
        folder: Folder in which the application was started; searches start in it, too.
        pool, base, device: For local model names, as in `swarm.registry.registry.Roster`.
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
        """Folder of the runs."""
        return self.folder / RUNS_FOLDER

    @cached_property
    def run_index(self) -> RunIndex:
        """Index of the runs."""
        return RunIndex(self.runs_folder)

    @cached_property
    def launcher(self) -> SearchLauncher:
        """Launcher of searches."""
        return SearchLauncher()

    @cached_property
    def roster(self) -> "Roster":
        """Models by name, shared by all pages so that each is loaded only once."""
        from swarm.registry.registry import Roster

        return Roster(base=self.base, pool=self.pool, device=self.device)

    def run_path(self, name: str) -> Path:
        """Return the folder of a run, which may not exist.

        Args:
            name: Name of the run folder; for a search in a sweep, "SWEEP/SEARCH".

        Raises:
            UserError: The name is not valid for a folder.
        """
        parts = name.split("/")
        if len(parts) > 2 or not all(
            RUN_NAME_PATTERN.fullmatch(one) and one[0] != "." for one in parts
        ):
            raise UserError(f"{name!r:.80} is not a run name; allowed: the name of a folder")
        return self.runs_folder / name
