"""What all pages share: the folder of runs, and the models by name."""

import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.errors import UserError
from swarm.report.folder import HOME
from swarm.ui.launching import Launcher
from swarm.ui.shelf import Shelf

if TYPE_CHECKING:
    from swarm.roster import Roster

NAME = re.compile(r"[^/\\\x00-\x1f]+")


class Home:
    """Where the page is at home.

    Args:
        folder: Where it was started; searches start there too.
        pool, base, device: Of local names, as `swarm.roster.Roster` has them.
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
    def runs(self) -> Path:
        """The folder of runs."""
        return self.folder / HOME

    @cached_property
    def shelf(self) -> Shelf:
        """The runs, as lists show them."""
        return Shelf(self.runs)

    @cached_property
    def launcher(self) -> Launcher:
        """What starts and stops searches."""
        return Launcher()

    @cached_property
    def roster(self) -> "Roster":
        """The models by name; the same ones on every page, so that each is loaded once."""
        from swarm.roster import Roster

        return Roster(base=self.base, pool=self.pool, device=self.device)

    def run(self, name: str) -> Path:
        """The folder of a run, which need not be there.

        Args:
            name: Of its folder; of a search that is part of a sweep, the sweep's and its own.

        Raises:
            UserError: The name is no folder's name.
        """
        parts = name.split("/")
        if len(parts) > 2 or not all(NAME.fullmatch(one) and one[0] != "." for one in parts):
            raise UserError(f"{name!r:.80} is no name of a run; allowed: the name of a folder")
        return self.runs / name
