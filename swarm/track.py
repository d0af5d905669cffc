"""Shows a run elsewhere than in its folder: Weights & Biases, or nowhere."""

import hashlib
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlparse

from swarm.errors import UserError

MODES = ("online", "offline", "disabled")


class Tracker(Protocol):
    """Is told what a run does."""

    def check(self) -> None:
        """Whether a run could be shown; called before anything is written.

        Raises:
            UserError: It could not.
        """
        ...

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        """A run begins, or goes on, in a folder."""
        ...

    def log(self, iteration: int, values: Mapping[str, Any]) -> None:
        """Numbers of one iteration."""
        ...

    def finish(self, metrics: Mapping[str, Any]) -> None:
        """The run is over."""
        ...


class WandB:
    """Weights & Biases, with the original's series: g, g_worst, particle_<i>_now.

    A run that goes on keeps its id, so that it is one run there too.

    Args:
        mode: "online", "offline" (synchronised later) or "disabled".
        project, entity: Where the run appears; `entity=None` is the account's own.
    """

    def __init__(self, mode: str, project: str = "model-swarms", entity: str | None = None) -> None:
        if mode not in MODES:
            raise UserError(f"wandb={mode}: must be one of {', '.join(MODES)}", 2)
        self.mode, self.project, self.entity = mode, project, entity
        self._run: Any = None

    def check(self) -> None:
        """See `Tracker`: online needs a key, from the environment or from `wandb login`."""
        if self.mode == "online" and not os.environ.get("WANDB_API_KEY") and not _logged_in():
            raise UserError("wandb=online: nobody is logged in; `wandb login`, or wandb=offline")

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        """See `Tracker`."""
        if self.mode == "disabled":
            return
        import wandb

        try:
            self._run = wandb.init(
                project=self.project,
                entity=self.entity,
                name=folder.name,
                id=hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16],
                resume="allow",
                dir=str(folder),
                config=dict(config),
                mode=self.mode,  # type: ignore[arg-type]
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.errors.Error as error:
            raise UserError(
                f"wandb={self.mode}: {error}; log in with `wandb login`, or use wandb=offline"
            ) from None

    def log(self, iteration: int, values: Mapping[str, Any]) -> None:
        """See `Tracker`."""
        if self._run is not None:
            self._run.log(dict(values), step=iteration)

    def finish(self, metrics: Mapping[str, Any]) -> None:
        """See `Tracker`."""
        if self._run is not None:
            self._run.summary.update(dict(metrics))
            self._run.finish()
            self._run = None


def _logged_in() -> bool:
    """Whether `wandb login` has left a key for the server in use."""
    server = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(server) is not None
    except (OSError, netrc.NetrcParseError):
        return False
