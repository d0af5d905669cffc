"""What trackers have written, read back."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 32768


def records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: a log in LevelDB's format after a header of seven bytes."""
    place, parts = 7, b""
    while place + 7 <= len(data):
        room = BLOCK - place % BLOCK
        if room < 7:
            place += room
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        if place + 7 + length > len(data):
            return  # it is being written
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


class Offline:
    """The one offline run of a folder.

    Attributes:
        history: A row a step.
        summary, config: Of the run.
        run: Its record: id, group, kind.
        artifacts, metrics: Their records.
        code: With which it ended.
        files: The folder with what the run keeps beside its log.
    """

    def __init__(self, folder: Path) -> None:
        deadline = time.monotonic() + 120
        self.code: int | None = None
        # The process that writes the file takes its time after the run has finished.
        while self.code is None and time.monotonic() < deadline:
            time.sleep(0.02)
            self._read(folder)
        self.steps = [row["_step"] for row in self.history]

    def _read(self, folder: Path) -> None:
        from wandb.proto import wandb_internal_pb2

        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.run: Any = None
        self.artifacts: list[Any] = []
        self.metrics: list[Any] = []
        (file,) = folder.glob("wandb/offline-run-*/*.wandb")
        self.files = file.parent / "files"
        for data in records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                self.history.append(_values(record.history.item))
            elif kind == "summary":
                self.summary |= _values(record.summary.update)
            elif kind == "run":
                self.run = record.run
                self.config |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
            elif kind == "artifact":
                self.artifacts.append(record.artifact)
            elif kind == "metric":
                self.metrics.append(record.metric)
            elif kind == "exit":
                self.code = record.exit.exit_code


def _values(items: Any) -> dict[str, Any]:
    return {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}


def events(folder: Path) -> Any:
    """TensorBoard's own reading of the event files of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0})
    return found.Reload()


def text(found: Any, name: str) -> str:
    """The text of a name, of its last step."""
    told: bytes = found.Tensors(name)[-1].tensor_proto.string_val[0]
    return told.decode()
