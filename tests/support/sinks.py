"""What sinks have been given, read back: TensorBoard's files by its reader, W&B's offline files by its messages.

A .wandb file is a log of LevelDB's format (https://github.com/google/leveldb/blob/main/doc/log_format.md) behind seven
bytes: blocks of 32 KiB of fragments with a checksum, a length and a kind; wandb 0.31 has no reader of it in Python.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK, HEADER, WHOLE, LAST = 32768, 7, 1, 4
Points = dict[str, list[tuple[int, float]]]


def tensorboard_points(folder: Path) -> Points:
    """(step, value) by tag, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={SCALARS: 0})
    found.Reload()
    return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def offline_folders(run_folder: Path) -> list[Path]:
    """Those of W&B, by the time when they began."""
    return sorted((run_folder / "wandb").glob("offline-run-*"))


def wandb_points(folder: Path) -> Points:
    """(step, value) by name in an offline folder of W&B."""
    points: Points = {}
    for message in _messages(folder):
        if message.WhichOneof("record_type") == "history":
            values = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in message.history.item
            }
            for name, value in values.items():
                if not name.startswith("_"):
                    points.setdefault(name, []).append((values["_step"], value))
    return points


def wandb_run(folder: Path) -> Any:
    """The message that tells of the run: run_id, project, config."""
    (run,) = (message.run for message in _messages(folder) if message.WhichOneof("record_type") == "run")
    return run


def _messages(folder: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("run-*.wandb")
    for content in _fragments(path.read_bytes()):
        message = wandb_internal_pb2.Record()
        message.ParseFromString(content)
        yield message


def _fragments(content: bytes) -> Iterator[bytes]:
    at, parts = HEADER, b""
    while at + HEADER <= len(content):
        left = BLOCK - at % BLOCK
        _, length, kind = struct.unpack_from("<IHB", content, at)
        if left < HEADER or kind == 0:  # a block's filling
            at += left
            continue
        parts += content[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (WHOLE, LAST):
            yield parts
            parts = b""
