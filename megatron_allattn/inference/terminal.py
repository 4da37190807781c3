"""Lines from standard input while the main thread stays free, and Ctrl-C as a count.

The main thread must not wait in a read: it has other ranks to tell that all is well. So a thread of its own reads the
next line, on a terminal with the line editing of readline, and may be left behind when the program ends.
"""

import contextlib
import importlib
import io
import signal
import sys
import termios
from queue import Empty, SimpleQueue
from threading import Thread
from types import FrameType, TracebackType
from typing import Any

MOST = 3  # a third Ctrl-C is none that somebody waits for: it ends the program as it would otherwise


class Interrupts:
    """Within it Ctrl-C only counts, or does nothing where it is not heeded.

    count: how often it came; whoever acts upon it sets it back.
    """

    def __init__(self, *, heeded: bool) -> None:
        self.count, self._heeded = 0, heeded
        self._before: Any = None

    def __enter__(self) -> "Interrupts":
        self._before = signal.signal(signal.SIGINT, self._come if self._heeded else signal.SIG_IGN)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _come(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count >= MOST:
            raise KeyboardInterrupt


class Keyboard:
    """Standard input, line by line; the terminal is left as it was found.

    line: what was typed last, without its line end, None at the end of the input; bytes that are no UTF-8 are escaped
    as by os.fsdecode.
    """

    def __init__(self) -> None:
        self.terminal = sys.stdin is not None and sys.stdin.isatty()
        self.line: str | None = None
        self._lines: SimpleQueue[str | BaseException | None] = SimpleQueue()
        self._settings: Any = None

    def __enter__(self) -> "Keyboard":
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        if self.terminal:
            self._settings = termios.tcgetattr(sys.stdin)
            with contextlib.suppress(ImportError):  # without it a line can be less well edited
                importlib.import_module("readline")
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if self._settings is not None:
            termios.tcsetattr(sys.stdin, termios.TCSANOW, self._settings)

    def ask(self, prompt: str) -> None:
        """Begin to wait for a line; prompt: what a terminal shows in front of it."""
        Thread(target=self._read, args=(prompt if self.terminal else "",), daemon=True).start()

    def answered(self, seconds: float) -> bool:
        """Whether the line has come, after waiting for it so long. Raises what reading it has raised."""
        try:
            found = self._lines.get(timeout=seconds)
        except Empty:
            return False
        if isinstance(found, BaseException):
            raise found
        self.line = found
        return True

    def _read(self, prompt: str) -> None:
        try:
            self._lines.put(input(prompt) if sys.stdin is not None else None)
        except EOFError:
            self._lines.put(None)
        except BaseException as error:
            self._lines.put(error)
