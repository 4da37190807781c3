"""The live view: a screen of its own, drawn anew when something has changed, and the keys that close it."""

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from megatron_allattn.config.errors import usage_error
from megatron_allattn.watching.screen import lines
from megatron_allattn.watching.standing import is_run
from megatron_allattn.watching.view import View

DRAW_SECONDS = 1.0
LOOK_SECONDS = 0.25  # between two looks at the terminal's size
_CLOSED = (b"", b"q", b"Q", b"\x03", b"\x04")  # the terminal is gone; q, Ctrl-C, Ctrl-D


def watch(folder: Path, *, once: bool, wait: bool) -> int:
    """Show a run until it is closed; once where that is asked for, or the output is no terminal. Returns 0.

    wait: for a folder that is not there yet. Raises UsageError: it is not there, holds no run, or cannot be read.
    """
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    live = console.is_terminal and not console.is_dumb_terminal and not once
    view = View(folder)
    with _signals(live=live):
        try:
            if live:
                _show(console, view, wait=wait)
            else:
                while not _is_there(folder, wait=wait):
                    time.sleep(LOOK_SECONDS)
                view.look_at_all()
        except KeyboardInterrupt:  # it is closed
            pass
        if is_run(folder):
            _print(console, view)
    return 0


def _is_there(folder: Path, *, wait: bool) -> bool:
    """Whether there is a run to look at; False only where it may be waited for."""
    if folder.exists() and not folder.is_dir():
        raise usage_error("DIR", folder, "is no folder", "give the run folder of --save")
    if is_run(folder):
        return True
    if wait:
        return False
    rule = "holds no run" if folder.exists() else "is not there"
    raise usage_error("DIR", folder, rule, "give the run folder of --save, or --wait for one that is to come")


def _print(console: Console, view: View) -> None:
    """The run as it was looked at last, as text that stays."""
    for line in lines(view, console.width, None, plain=_is_plain(console), keys=False):
        console.print(line)


def _show(console: Console, view: View, *, wait: bool) -> None:
    """The live view, until it is closed."""
    _is_there(view.folder, wait=wait)
    with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            if there := _is_there(view.folder, wait=True):
                view.look()
                size = console.size
                text = lines(view, size.width, size.height, plain=_is_plain(console), keys=True)
            else:
                text = [Text(f"waiting for {view.folder}", style="cyan"), Text("q closes this view", style="dim")]
            live.update(Group(*text), refresh=True)
            if _closed_within(keys, 0.0 if there and view.reading else DRAW_SECONDS, console):
                return


def _closed_within(keys: int | None, seconds: float, console: Console) -> bool:
    """Wait so long for a key that closes the view; less where the terminal gets another size."""
    size, deadline = console.size, time.monotonic() + seconds
    while True:
        left = max(0.0, min(LOOK_SECONDS, deadline - time.monotonic()))
        if keys is None:
            time.sleep(left)
        elif select.select([keys], [], [], left)[0]:
            pressed = b""
            with suppress(OSError):  # the terminal is gone
                pressed = os.read(keys, 1)
            if pressed in _CLOSED:
                return True
        if time.monotonic() >= deadline or console.size != size:
            return False


@contextmanager
def _keys() -> Iterator[int | None]:
    """Standard input, giving keys as they are pressed; None where it is no terminal of this process to read from."""
    try:
        descriptor = sys.stdin.fileno()
        mine = os.isatty(descriptor) and os.tcgetpgrp(descriptor) == os.getpgrp()
    except (AttributeError, OSError, ValueError):  # closed, or none
        mine = False
    if not mine:
        yield None
        return
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield descriptor
    finally:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextmanager
def _signals(*, live: bool) -> Iterator[None]:
    """SIGTERM and SIGHUP leave the terminal as it was, too. live: Ctrl-C closes the view, also where what has started
    this process has it ignored, as scripts do in the background."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    if live:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_plain(console: Console) -> bool:
    return not console.encoding.lower().startswith("utf")
