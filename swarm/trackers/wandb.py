"""Weights & Biases: a run there for a run here, online, or in files that are sent later."""

import logging
import netrc
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from swarm._util.files import write_atomic
from swarm._util.secrets import clean
from swarm.errors import UserError
from swarm.trackers.base import (
    LoggedValue,
    SafeTracker,
    StackedAreaChart,
    TrackedRun,
    TrackerTable,
)

WANDB_MODES = ("online", "offline")

DEFAULT_PROJECT = "model-swarms"

FINISH_TIMEOUT_S = 120.0
"""How long the end of a run may wait for a server that does not answer."""

INIT_TIMEOUT_S = 30.0
"""How long a run may be held by what a killed process has left."""

log = logging.getLogger(__name__)


class WandB(SafeTracker):
    """Weights & Biases.

    A run that goes on keeps its id, which lies in its folder, so that it is one run there too. An
    offline run is written anew from its first step by every start, whole, in the place of what
    earlier starts have written: there is one folder to send, and no step is missing or twice there.

    Args:
        mode: "online" or "offline" (sent later, by `wandb sync`); offline as well where the
            package's own variable WANDB_MODE says so.
        project, entity: Where the run appears; `None` is what WANDB_PROJECT and WANDB_ENTITY say,
            else "model-swarms" and the account's own.
        group: Of runs that belong together.
        model: Whether the best adapter is kept there, as an artifact.
        uses: Artifacts that the experts come from, beside those whose folder's name tells.
    """

    name = "WandB"

    def __init__(
        self,
        mode: str = "online",
        project: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        model: bool = True,
        uses: Sequence[str] = (),
    ) -> None:
        if mode not in WANDB_MODES:
            raise UserError(f"tracker.mode={mode}: must be one of {', '.join(WANDB_MODES)}", 2)
        if isinstance(uses, str):
            raise UserError(f"tracker.uses={uses}: must be a list of artifacts, [{uses}]", 2)
        if mode == "online" and os.environ.get("WANDB_MODE") in ("offline", "dryrun"):
            mode = "offline"
        self.mode, self.entity, self.group = mode, entity, group
        self.project = project or os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT)
        self.keeps_model, self.uses = model, tuple(uses)
        self._run: Any = None

    def check(self) -> None:
        """See `Tracker`: online needs a key, from the environment or from `wandb login`."""
        if self.mode == "online" and not os.environ.get("WANDB_API_KEY") and not _is_logged_in():
            raise UserError(
                "tracker=wandb: nobody is logged in; `wandb login`, or tracker.mode=offline"
            )

    def _start_run(self, shown: TrackedRun) -> int:
        # Else a mistake inside of the package is reported to its makers, offline too.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        if "wandb" not in sys.modules:
            # A parent's service would go on holding the run of a process that is killed.
            os.environ.pop("WANDB_SERVICE", None)
        import wandb

        online, folder = self.mode == "online", shown.folder.resolve()
        for before in () if online else folder.glob("wandb/offline-run-*"):
            shutil.rmtree(before, ignore_errors=True)
        self._run = _init_run(
            project=self.project,
            entity=self.entity,
            group=self.group,
            name=folder.name,
            job_type=shown.kind,
            id=_run_id(folder / "wandb"),
            dir=str(folder),
            mode=self.mode,
            resume="allow" if online else None,
            reinit="create_new",
            config=clean(shown.config),
            settings=_build_settings(wandb),
        )
        if online:
            self._use_artifacts([*self.uses, *artifact_names(shown.sources)])
        return int(self._run.step)

    def _use_artifacts(self, artifacts: Sequence[str]) -> None:
        """Say where experts come from; a lineage that cannot be told costs no run."""
        for name in dict.fromkeys(artifacts):
            try:
                self._run.use_artifact(name)
            except Exception as error:  # whatever the server has against it
                log.warning("WandB: the run does not name the artifact %s (%s)", name, error)

    def _log_values(self, step: int, values: Mapping[str, LoggedValue]) -> None:
        # At once: a row that waits for the next one is lost with the process.
        made = {name: _to_wandb(value) for name, value in values.items()}
        self._run.log(made, step=step, commit=True)

    def _log_model(self, folder: Path, facts: Mapping[str, Any]) -> None:
        if not self.keeps_model:
            return
        import wandb

        name = re.sub(r"[^a-zA-Z0-9_.-]+", "-", f"{self._run.name}-best")
        artifact = wandb.Artifact(name, type="model", metadata=dict(facts))
        for file in sorted(folder.rglob("*")):
            if file.is_file() and not file.name.endswith(".jsonl"):
                # No copy of what may be large: the file stays where it is until it is sent.
                artifact.add_file(
                    str(file.resolve()), str(file.relative_to(folder)), policy="immutable"
                )
        self._run.log_artifact(artifact)

    def _finish_run(self, summary: Mapping[str, Any], code: int) -> None:
        run, self._run = self._run, None
        try:
            run.summary.update(dict(summary))
        finally:
            run.finish(exit_code=code)


def _init_run(**given: Any) -> Any:
    """The run, begun.

    Raises:
        UserError: It cannot be begun.
    """
    import wandb

    deadline = time.monotonic() + INIT_TIMEOUT_S
    while True:
        try:
            return wandb.init(**given)
        except Exception as error:  # whatever the package raises, inside of one another
            told = f"{error} {error.__cause__} {error.__context__}"
            # What a killed process leaves behind still holds the run, for a moment.
            if "in use" in told and time.monotonic() < deadline:
                time.sleep(0.5)
                continue
            raise UserError(
                f"tracker=wandb: {' '.join(str(error).split())}; log in with `wandb login`, or use "
                "tracker.mode=offline"
            ) from None


def _build_settings(wandb: Any) -> Any:
    """What the package may look at and send: nothing that this toolkit did not tell it.

    Not the code, the command line, git, the host's name, what is installed or the terminal.
    """
    return wandb.Settings(
        console="off",
        silent=True,
        save_code=False,
        disable_code=True,
        disable_git=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
        host="",
        finish_timeout=FINISH_TIMEOUT_S,
    )


def _run_id(folder: Path) -> str:
    """The run's id, which the folder keeps.

    Raises:
        UserError: The folder cannot be written.
    """
    path = folder / "id"
    if not path.is_file():
        write_atomic(path, uuid.uuid4().hex[:16].encode())
    return path.read_text().strip()


def _to_wandb(value: LoggedValue) -> Any:
    """A value as the package has it."""
    if isinstance(value, TrackerTable):
        import wandb

        return wandb.Table(
            columns=list(value.columns),
            data=[list(row) for row in value.rows],
            allow_mixed_types=True,
        )
    if isinstance(value, StackedAreaChart):
        import wandb

        from swarm.trackers.base import render_svg

        return wandb.Html(render_svg(value), inject=False)
    return value


def artifact_names(folders: Sequence[Path]) -> list[str]:
    """Names of artifacts, NAME:v3, as folders that they were downloaded to are called."""
    parts = (part for folder in folders for part in folder.resolve().parts)
    return [part for part in parts if re.fullmatch(r"[\w.-]+:v\d+", part)]


def _is_logged_in() -> bool:
    """Whether `wandb login` has left a key for the server in use."""
    server = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc().authenticators(server) is not None
    except (OSError, netrc.NetrcParseError):
        return False
