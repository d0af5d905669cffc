"""Weights & Biases tracker, online, or offline for a later `wandb sync`."""

import contextlib
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
from typing import Any, Literal
from urllib.parse import urlparse

from swarm._util.files import write_atomic
from swarm._util.settings import checked
from swarm.errors import UserError
from swarm.trackers.base import Tracker, coefficient_table

DEFAULT_PROJECT = "model-swarms"

FINISH_TIMEOUT_S = 120.0
"""Time in seconds that finishing a run may wait for a server that does not respond."""

INIT_TIMEOUT_S = 30.0
"""Time in seconds to retry while a killed process's service still holds the run."""

log = logging.getLogger(__name__)


@checked("tracker")
class WandB(Tracker):
    """Weights & Biases tracker.

    The run id is stored in the run folder, so that a resumed run continues the same run on the
    server. An offline run is rewritten from its first step by every start and replaces the files of
    earlier starts: there is one folder to sync, with no missing or duplicate step.

    Args:
        mode: "online" or "offline" (sent later by `wandb sync`); the environment variable
            WANDB_MODE can also select offline.
        project, entity: Project and account of the run; `None` uses WANDB_PROJECT and WANDB_ENTITY,
            else "model-swarms" and the account's default.
        group: Group of related runs.
        model: Whether to log the best adapter as an artifact.
        uses: Input artifacts, besides those derived from the names of the experts' folders.
        link: Collection to which the artifact is linked, "wandb-registry-NAME/COLLECTION" or
            "[TEAM/]PROJECT/COLLECTION"; online only.
    """

    name = "WandB"

    def __init__(
        self,
        mode: Literal["online", "offline"] = "online",
        project: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        model: bool = True,
        uses: Sequence[str] = (),
        link: str | None = None,
    ) -> None:
        if link is not None and not re.fullmatch(r"[^/:]+(/[^/:]+){1,2}", str(link)):
            raise UserError(
                f"""tracker.link={link}: must be null or a collection,
                wandb-registry-NAME/COLLECTION or PROJECT/COLLECTION""",
                2,
            )
        if link is not None and not model:
            raise UserError("tracker.link: needs the artifact; set tracker.model=true", 2)
        if mode == "online" and os.environ.get("WANDB_MODE") in ("offline", "dryrun"):
            mode = "offline"
        self.mode, self.entity, self.group = mode, entity, group
        self.project = project or os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT)
        self.keeps_model, self.uses, self.link = model, tuple(uses), link
        self._run: Any = None

    def check(self) -> None:
        """See `Tracker`: online needs a key, from the environment or from `wandb login`."""
        if self.mode == "offline" or os.environ.get("WANDB_API_KEY"):
            return
        server = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
        logged_in = None
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            logged_in = netrc.netrc().authenticators(server)
        if logged_in is None:
            raise UserError(
                "tracker=wandb: not logged in; run `wandb login`, or tracker.mode=offline"
            )

    def _start_run(self, folder: Path, config: Mapping[str, Any], sources: Sequence[Path]) -> int:
        # Otherwise wandb reports its internal errors to its developers, even offline.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        if "wandb" not in sys.modules:
            # An inherited service would still hold the run after this process is killed.
            os.environ.pop("WANDB_SERVICE", None)
        import wandb

        online, folder = self.mode == "online", folder.resolve()
        for before in () if online else folder.glob("wandb/offline-run-*"):
            shutil.rmtree(before, ignore_errors=True)
        id_file = folder / "wandb" / "id"
        if not id_file.is_file():
            write_atomic(id_file, uuid.uuid4().hex[:16].encode())
        self._run = _init_run(
            project=self.project,
            entity=self.entity,
            group=self.group,
            name=folder.name,
            job_type="search",
            tags=_list_tags(config),
            id=id_file.read_text().strip(),
            dir=str(folder),
            mode=self.mode,
            resume="allow" if online else None,
            reinit="create_new",
            config=dict(config),
            # Collect and send only what this toolkit logs: no code, command line, git, host name,
            # installed packages or terminal output.
            settings=wandb.Settings(
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
            ),
        )
        # The table of all runs has a column per value: a particle's last utility is not a result.
        self._run.define_metric("particle/*", summary="none")
        for name in dict.fromkeys([*self.uses, *artifact_names(sources)]) if online else ():
            try:
                self._run.use_artifact(name)
            except Exception as error:  # lineage is optional
                log.warning("WandB: the run does not name the artifact %s (%s)", name, error)
        return int(self._run.step)

    def _log_values(self, step: int, values: Mapping[str, float]) -> None:
        # Commit immediately: wandb buffers a row until the next step, and a kill would lose it.
        self._run.log(dict(values), step=step, commit=True)

    def _log_model(self, folder: Path, facts: Mapping[str, Any]) -> None:
        import wandb

        header, *rows = coefficient_table(facts)
        self._run.summary["overview/coefficients"] = wandb.Table(header, rows)
        if not self.keeps_model:
            return
        name = re.sub(r"[^a-zA-Z0-9_.-]+", "-", f"{self._run.name}-best")
        artifact = wandb.Artifact(name, type="model", metadata=dict(facts))
        for file in sorted(folder.rglob("*")):
            if file.is_file() and not file.name.endswith(".jsonl"):
                name_in_it = str(file.relative_to(folder))
                # "immutable" avoids a copy of large files: wandb reads them when it uploads.
                artifact.add_file(str(file.resolve()), name_in_it, policy="immutable")
        logged = self._run.log_artifact(artifact)
        self._run.summary["best_artifact"] = name
        reason: Any = "the run is offline; link it on its page after `wandb sync`"
        if self.link and self.mode == "online":
            try:
                logged.wait(FINISH_TIMEOUT_S)
                self._run.link_artifact(logged, self.link)
                return
            except Exception as error:  # the artifact itself is complete
                reason = error
        if self.link:
            log.warning("WandB: the artifact is not linked to %s (%s)", self.link, reason)

    def _finish_run(self, summary: Mapping[str, Any], code: int) -> None:
        run, self._run = self._run, None
        try:
            run.summary.update(dict(summary))
        finally:
            run.finish(exit_code=code)


def _init_run(**given: Any) -> Any:
    """Start the run.

    Raises:
        UserError: It cannot be started.
    """
    import wandb

    deadline = time.monotonic() + INIT_TIMEOUT_S
    while True:
        try:
            return wandb.init(**given)
        except Exception as error:  # of any type, often nested
            message = f"{error} {error.__cause__} {error.__context__}"
            # The service of a killed process holds the run for a short time; retry.
            if "in use" in message and time.monotonic() < deadline:
                time.sleep(0.5)
                continue
            raise UserError(
                f"tracker=wandb: {' '.join(str(error).split())}; log in with `wandb login`, or use "
                "tracker.mode=offline"
            ) from None


def _list_tags(config: Mapping[str, Any]) -> list[str]:
    """Return the task, base, optimizer and seed of a configuration, at most 64 characters each."""
    model, optimizer = config.get("model") or {}, config.get("optimizer") or {}
    found = {
        "task": (config.get("task") or {}).get("name"),
        "base": str(model.get("name") or model.get("path") or "").rpartition("/")[2],
        "optimizer": str(optimizer.get("_target_") or "").rpartition(".")[2],
        "seed": config.get("seed"),
    }
    return [f"{key}: {value}"[:64] for key, value in found.items() if value not in (None, "")]


def artifact_names(folders: Sequence[Path]) -> list[str]:
    """Return artifact names (NAME:v3) from folder names, as wandb downloads create them."""
    parts = (part for folder in folders for part in folder.resolve().parts)
    return [part for part in parts if re.fullmatch(r"[\w.-]+:v\d+", part)]
