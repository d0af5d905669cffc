"""TensorBoard tracker: an event file in the run folder."""

import json
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from swarm._util.secrets import clean
from swarm.errors import UserError, install_command
from swarm.trackers.base import (
    LoggedValue,
    SafeTracker,
    SeriesChart,
    StackedAreaChart,
    TrackedRun,
    TrackerTable,
)

MAX_ROWS = 200
"""Maximum number of table rows; tables are logged as text, which the page displays in full."""

MAX_CELL_LENGTH = 300
"""Maximum length of a cell in characters."""


class TensorBoard(SafeTracker):
    """TensorBoard tracker; each start rewrites its single event file from the first step."""

    name = "TensorBoard"

    def __init__(self) -> None:
        self._writer: Any = None
        self._last = 0

    def check(self) -> None:
        """See `swarm.trackers.Tracker`."""
        if find_spec("tensorboard") is None:
            raise UserError(
                f"tracker=tensorboard needs tensorboard: {install_command('tensorboard')}"
            )

    def _start_run(self, shown: TrackedRun) -> int:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = shown.folder / "tensorboard"
        before = sorted(folder.glob("events.out.tfevents.*"))
        name = f"events.out.tfevents.{time.time():.6f}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # tensorboard's EventFileWriter writes in a thread and blocks forever on a full disk.
            self._writer = RecordWriter((folder / name).open("wb"))
            self._write_event(0, file_version="brain.Event:2")
            # SessionLog.START makes an open page discard the events of an earlier file.
            self._write_event(0, session_log=SessionLog(status=SessionLog.START))
            self._write_text("config", _json_block(clean(shown.config)), 0)
            if shown.charts:
                self._write_layout(shown.charts)
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

    def _log_values(self, step: int, values: Mapping[str, LoggedValue]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._last = max(self._last, step)
        scalars = []
        for name, value in values.items():
            if isinstance(value, TrackerTable):
                self._write_text(name, _markdown_table(value), step)
            elif isinstance(value, StackedAreaChart):
                self._write_image(name, value, step)
            else:
                scalars.append(Summary.Value(tag=name, simple_value=float(value)))
        if scalars:
            self._write_event(step, summary=Summary(value=scalars))
        self._writer.flush()

    def _log_model(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self._write_text("best", _json_block(facts), self._last)

    def _finish_run(self, summary: Mapping[str, Any], code: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = {k: v for k, v in summary.items() if type(v) in (int, float, bool)}
        values = [
            Summary.Value(tag=f"final/{k}", simple_value=float(v)) for k, v in numbers.items()
        ]
        self._write_event(self._last, summary=Summary(value=values))
        self._write_text("final", _json_block(summary), self._last)
        if code:
            self._write_text(
                "interrupted", f"The run did not come to its end (code {code}).", self._last
            )
        writer, self._writer = self._writer, None
        writer.close()

    def _write_event(self, step: int, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        event = Event(wall_time=time.time(), step=step, **what)
        self._writer.write(event.SerializeToString())

    def _write_text(self, name: str, markdown: str, step: int) -> None:
        self._write_bytes(name, markdown.encode("utf-8", "replace"), step, "text")

    def _write_layout(self, charts: Sequence[SeriesChart]) -> None:
        """Lay out the page's tab Custom Scalars, where a chart has several series."""
        from tensorboard.plugins.custom_scalar import layout_pb2, metadata

        sections: dict[str, list[layout_pb2.Chart]] = {}
        for one in charts:
            lines = layout_pb2.MultilineChartContent(tag=one.series)
            chart = layout_pb2.Chart(title=one.title, multiline=lines)
            sections.setdefault(one.section, []).append(chart)
        layout = layout_pb2.Layout(
            category=[
                layout_pb2.Category(title=title, chart=some) for title, some in sections.items()
            ]
        )
        content = layout.SerializeToString()
        self._write_bytes(metadata.CONFIG_SUMMARY_TAG, content, 0, metadata.PLUGIN_NAME)

    def _write_bytes(self, name: str, content: bytes, step: int, plugin: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=plugin))
        tensor = TensorProto(dtype=DT_STRING, string_val=[content])
        value = Summary.Value(tag=name, metadata=kind, tensor=tensor)
        self._write_event(step, summary=Summary(value=[value]))

    def _write_image(self, name: str, stacked: StackedAreaChart, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        from swarm.trackers.base import PICTURE_SIZE, render_stacked

        image = Summary.Image(
            width=PICTURE_SIZE[0],
            height=PICTURE_SIZE[1],
            colorspace=3,
            encoded_image_string=render_stacked(stacked, "png"),
        )
        self._write_event(step, summary=Summary(value=[Summary.Value(tag=name, image=image)]))


def _json_block(value: Mapping[str, Any]) -> str:
    """Format values as JSON in a Markdown code block."""
    return "".join(f"    {line}\n" for line in json.dumps(value, indent=1, default=str).split("\n"))


def _markdown_table(table: TrackerTable) -> str:
    rows = [table.columns, ["---"] * len(table.columns), *table.rows[:MAX_ROWS]]
    left = len(table.rows) - MAX_ROWS
    more = f"\n\nand {left:,} rows more, which the run's folder has" if left > 0 else ""
    return "\n".join("| " + " | ".join(map(_format_cell, row)) + " |" for row in rows) + more


def _format_cell(value: Any) -> str:
    words = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(words.replace("|", "\\|").split())[:MAX_CELL_LENGTH]
