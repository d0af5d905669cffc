"""TensorBoard tracker: an event file in the run folder."""

import json
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent
from typing import Any

from swarm.errors import UserError, install_command
from swarm.trackers.base import Tracker, coefficient_table


class TensorBoard(Tracker):
    """TensorBoard tracker; each start rewrites its single event file from the first step."""

    name = "TensorBoard"

    def __init__(self) -> None:
        self._writer: Any = None
        self._last = 0

    def check(self) -> None:
        """See `Tracker`: the package has to be installed."""
        if find_spec("tensorboard") is None:
            install = install_command("tensorboard")
            raise UserError(f"tracker=tensorboard needs tensorboard: {install}")

    def _start_run(self, folder: Path, config: Mapping[str, Any], sources: Sequence[Path]) -> int:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = folder / "tensorboard"
        before = sorted(folder.glob("events.out.tfevents.*"))
        name = f"events.out.tfevents.{time.time():.6f}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # tensorboard's EventFileWriter writes in a thread and blocks forever on a full disk.
            self._writer = RecordWriter((folder / name).open("wb"))
            self._write_event(0, file_version="brain.Event:2")
            # SessionLog.START makes an open page discard the events of an earlier file.
            self._write_event(0, session_log=SessionLog(status=SessionLog.START))
            self._write_text("config", config, 0)
            self._writer.flush()
            # Removed only now, so that a failed start leaves the earlier file intact.
            for file in before:
                file.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"tracker=tensorboard: cannot write {folder}: {error.strerror}; choose "
                "another folder"
            ) from None
        return 0

    def _log_values(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._last = max(self._last, step)
        scalars = [Summary.Value(tag=k, simple_value=float(v)) for k, v in values.items()]
        self._write_event(self._last, summary=Summary(value=scalars))
        self._writer.flush()

    def _log_model(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self._write_text("best", facts, self._last)
        header, *rows = [list(map(_format_cell, row)) for row in coefficient_table(facts)]
        lines = [header, ["---"] * len(header), *rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        self._write_text("overview/coefficients", table, self._last)

    def _finish_run(self, summary: Mapping[str, Any], code: int) -> None:
        self._write_text("overview/final", summary, self._last)
        if code:
            self._write_text("interrupted", f"The run was interrupted (code {code}).", self._last)
        writer, self._writer = self._writer, None
        writer.close()

    def _write_event(self, step: int, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        event = Event(wall_time=time.time(), step=step, **what)
        self._writer.write(event.SerializeToString())

    def _write_text(self, name: str, content: str | Mapping[str, Any], step: int) -> None:
        """Write Markdown, or values as a code block of JSON."""
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        if not isinstance(content, str):
            content = indent(json.dumps(content, indent=1, default=str), "    ")
        kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        data = content.encode("utf-8", "replace")
        tensor = TensorProto(dtype=DT_STRING, string_val=[data])
        value = Summary.Value(tag=name, metadata=kind, tensor=tensor)
        self._write_event(step, summary=Summary(value=[value]))


def _format_cell(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.3f}"
