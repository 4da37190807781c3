"""Blocks of the streams, read by a thread while the step before is computed.

The thread runs ahead on a copy of the streams; the streams themselves move on when a block is handed out, so that their
state is at every moment that of a run without a thread, and a checkpoint need not know of it.
"""

import copy
import queue
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from megatron_allattn.data.streams import Block, TokenStreams

DEPTH = 2  # blocks that wait at most: one for the next step and one more, against a slow read


class Prefetcher:
    """`next_block` of `streams` for the streams of one rank; a context manager, whose end is the end of the thread.

    prepare: what the thread does to every block, such as moving it into page-locked memory.
    """

    def __init__(
        self, streams: TokenStreams, own: Sequence[int], prepare: Callable[[Block], Block] | None = None
    ) -> None:
        self._streams, self._own, self._prepare = streams, own, prepare
        self._ready: queue.Queue[Block | BaseException] = queue.Queue(DEPTH)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(copy.copy(streams),), name="prefetch", daemon=True)

    def next_block(self) -> Block:
        """The next block, in order. An error of the thread is raised here, at the block that it could not read."""
        block = self._ready.get()
        if isinstance(block, BaseException):
            self._ready.put(block)  # for whoever asks again
            raise block
        self._streams.advance()
        return block

    def _read(self, ahead: TokenStreams) -> None:
        while not self._closing.is_set():
            found: Block | BaseException
            try:
                found = ahead.next_block(self._own)
                found = self._prepare(found) if self._prepare is not None else found
            except BaseException as error:  # whatever it is, it belongs to the one who waits for the block
                found = error
            self._ready.put(found)
            if isinstance(found, BaseException):
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.01)  # makes room, if it waits for some
            except queue.Empty:
                continue
        self._thread.join()
