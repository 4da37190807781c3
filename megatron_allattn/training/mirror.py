"""What a sink of metrics may do to a run: nothing. It is opened and written to on a thread of its own.

    training thread ── put ──▶ at most CAPACITY records ──▶ sink's thread ── write, flush ──▶ TensorBoard, W&B

A sink that fails is told of once and gets no more records. One that stands still does not hold up training: records
wait, those that find no room are dropped, which is told as it begins and, with how many, at the end. Nothing waits for
a sink longer than it says. metrics.jsonl has every record whatever becomes of its mirrors.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from megatron_allattn.config.errors import one_line
from megatron_allattn.config.reporting import MAY_HANG

CAPACITY = 10_000
"""Records that wait for a sink: some ten megabytes."""

Record = dict[str, Any]


class Sink(Protocol):
    """Where records go besides metrics.jsonl. Everything is called by one thread and may raise or stand still."""

    note: str | None
    """What the header says of it."""

    def catch_up(self, path: Path, size: int) -> None:
        """The run goes on: the first `size` bytes of metrics.jsonl are what its records so far are."""

    def write(self, record: Record) -> None:
        """Take a record."""

    def flush(self) -> None:
        """What was written can be looked at. Called when no record waits."""

    def close(self) -> None:
        """There will be no more."""


class Mirror:
    """A sink behind its thread. Constructing it begins to open the sink."""

    def __init__(self, name: str, opener: Callable[[], Sink], capacity: int = CAPACITY) -> None:
        self.name = name
        self.note: str | None = None
        self._opener = opener
        self._waiting: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(capacity)  # None: the end
        self._opened, self._awaited = threading.Event(), True
        self._error: Exception | None = None
        self._dropped, self._dead, self._closed = 0, False, False
        self._thread = threading.Thread(target=self._run, name=MAY_HANG + name, daemon=True)
        self._thread.start()

    def wait_until_open(self, seconds: float) -> None:
        """Raises what opening it has raised. Where that takes longer it is told, and records wait meanwhile."""
        if not self._opened.wait(seconds):
            self._awaited = False
            self._warn(f"has not started within {seconds:.3g} s: the run goes on, its records wait for it")
        if self._error is not None:
            raise self._error

    def put(self, record: Record) -> None:
        """Hand over a record, which is not changed any more. Never waits."""
        self._hand_over(lambda sink: sink.write(record))

    def catch_up(self, path: Path) -> None:
        """The run goes on with what is in metrics.jsonl now."""
        size = path.stat().st_size
        self._hand_over(lambda sink: sink.catch_up(path, size))

    def close(self, seconds: float) -> None:
        """Wait at most so long for what was handed over to be written; tell what is lost. Once."""
        if self._dead or self._closed:
            return
        self._closed, deadline = True, time.monotonic() + seconds
        try:
            self._waiting.put(None, timeout=seconds)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            pass
        if self._thread.is_alive() and not self._dead:
            self._warn(f"has not ended within {seconds:.3g} s: {self._lost(self._waiting.qsize())}")
        elif self._dropped:
            self._warn(self._lost(0))

    def _hand_over(self, item: Callable[[Sink], None]) -> None:
        if self._dead:
            return
        try:
            self._waiting.put_nowait(item)
        except queue.Full:
            if not self._dropped:
                self._warn(f"stands still, {self._waiting.maxsize:,} records wait: those that find no room are dropped")
            self._dropped += 1

    def _lost(self, waiting: int) -> str:
        still = f", up to {waiting:,} more if it does not go on" if waiting else ""
        return f"{self._dropped:,} record{'s' * (self._dropped != 1)} were dropped{still}; metrics.jsonl has them"

    def _run(self) -> None:
        try:
            sink = self._opener()
        except (Exception, SystemExit) as error:
            self._error = error if isinstance(error, Exception) else RuntimeError(f"exit {error.code}")
            self._dead = True
            self._opened.set()
            if not self._awaited:  # nobody waits for it any more
                self._warn(f"failed and gets no records ({one_line(str(self._error))})")
            return
        self.note = sink.note
        self._opened.set()
        try:
            while (item := self._waiting.get()) is not None:
                item(sink)
                if self._waiting.empty():
                    sink.flush()
            sink.close()
        except (Exception, SystemExit) as error:  # a convenience: whatever it raises, the run goes on
            self._dead = True
            self._warn(f"failed and gets no more records ({one_line(str(error)) or type(error).__name__})")

    def _warn(self, text: str) -> None:
        print(f"warning: {self.name} {text}", file=sys.stderr, flush=True)
