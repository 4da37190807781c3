"""A launcher as a child: its output goes on, and where a rank has failed, what that rank said last comes last.

    launch/launcher.py [--signal=USR1:TERM …] LAUNCHER ARGUMENTS

Ranks are started as launch/rank.py, whose marked lines (rank_process.py) are taken out of the output on the way. The
exit code is the launcher's, but never 0 where a rank's was not. SIGTERM, SIGINT, SIGHUP and SIGUSR1 are passed on to
the launcher, with --signal as another one that it treats better (torchrun dies of SIGUSR1, Open MPI's kills upon
SIGTERM). A launcher that goes on although a rank has failed, as MPICH's does where that rank does not use MPI, gets
SIGTERM after `ALONE_SECONDS`. When it has ended, whatever of its processes is left on this host is asked to stop by
SIGTERM and after `STOP_SECONDS` killed. It holds no torch.
"""

import ctypes
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from megatron_allattn.cluster.nodes.rank_process import END, Collector, Ended
from megatron_allattn.config.reporting import STOPPED

STOP_SECONDS = 600.0
"""What ranks get to save and stop: as long as a training's own --stop-deadline-minutes."""

ALONE_SECONDS = 30.0
"""What a launcher gets to end by itself once a rank has failed: ranks that miss it say so and end within seconds."""

AS_ASKED = f"launch: the ranks have stopped as they were asked to, with exit code {STOPPED}"
POLL_SECONDS = 0.2
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_SIGNAL = "--signal="
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: processes whose parent dies become children of this one


class _Stream:
    """One of the launcher's two streams, on its way to our own."""

    def __init__(self, number: int, collector: Collector) -> None:
        self._number, self._collector = number, collector
        self._pending = b""
        self._lost = False

    def take(self, piece: bytes) -> None:
        """Pass on all but marked lines; of the last line, if it is not whole, what comes before a mark."""
        *lines, rest = (self._pending + piece).split(b"\n")
        shown = [line + b"\n" for line in lines if not self._collector.take(line.decode(errors="replace"))]
        begun, mark, marked = rest.partition(END.encode())
        self._pending = mark + marked
        self.write(b"".join(shown) + begun)

    def end(self) -> None:
        if self._pending and not self._collector.take(self._pending.decode(errors="replace")):
            self.write(self._pending)
        self._pending = b""

    def write(self, content: bytes) -> None:
        """That nobody reads any more is no reason to end a run."""
        left = memoryview(content)
        while left and not self._lost:
            try:
                left = left[os.write(self._number, left) :]
            except OSError:
                self._lost = True


class Launching:
    """A launcher under way."""

    def __init__(self, command: Sequence[str], instead: Mapping[int, int]) -> None:
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)
        self._collector = Collector()
        self._launcher = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            close_fds=False,  # some of them are files that the launcher is to read (/dev/fd/9)
            process_group=0,  # signals come from here alone, once
        )
        self._instead = instead
        self._failed: float | None = None  # when a rank did
        for number in PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._signal)

    def _signal(self, number: int, _: object) -> None:
        if self._launcher.poll() is None:
            self._launcher.send_signal(self._instead.get(number, number))

    def run(self) -> int:
        """Until the end of the launcher and of what it has started on this host; the exit code."""
        self._relay()
        code = self._launcher.wait()
        first = self._collector.first()
        if first is not None:
            print(AS_ASKED if self._collector.stopped() else last_words(first), file=sys.stderr, flush=True)
            code = code or (first.code if first.code > 0 else 128 - first.code)
        return code if code >= 0 else 128 - code

    def _relay(self) -> None:
        """Pass on the output until nobody is there any more who could print; end those whom the launcher has left."""
        assert self._launcher.stdout is not None and self._launcher.stderr is not None
        begun: float | None = None
        asked: set[int] = set()
        with selectors.DefaultSelector() as selector:
            for stream, number in ((self._launcher.stdout, 1), (self._launcher.stderr, 2)):
                selector.register(stream, selectors.EVENT_READ, _Stream(number, self._collector))
            while selector.get_map() or self._launcher.poll() is None or _left():
                for key, _ in selector.select(POLL_SECONDS):
                    if piece := os.read(key.fd, 65_536):
                        key.data.take(piece)
                    else:
                        key.data.end()
                        selector.unregister(key.fileobj)
                if not selector.get_map():
                    time.sleep(POLL_SECONDS)
                if self._launcher.poll() is None:
                    self._end_alone()
                    continue
                left = _left()
                if not left and begun is None and selector.get_map():
                    continue  # to the end of what is in the pipes
                begun = time.monotonic() if begun is None else begun
                late = time.monotonic() - begun > STOP_SECONDS
                _send([pid for pid in left if late or pid not in asked], signal.SIGKILL if late else signal.SIGTERM)
                asked.update(left)  # children of those that end turn up later

    def _end_alone(self) -> None:
        """A rank has failed, and the others are still there."""
        if self._collector.ended and self._failed is None:
            self._failed = time.monotonic()
        if self._failed is not None and time.monotonic() - self._failed > ALONE_SECONDS:
            self._failed = math.inf
            self._launcher.terminate()


def _left() -> list[int]:
    """Processes that the launcher has left, which are children of this one by now; those that have ended are reaped."""
    left = []
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, path.read_text().split()):
            with suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    left.append(pid)
    return left


def _send(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def last_words(ended: Ended) -> str:
    """How a rank ended, and what it said last."""
    how = f"was killed by {_name(-ended.code)}" if ended.code < 0 else f"ended with exit code {ended.code}"
    head = f"launch: rank {ended.rank} on {ended.host} {how}, before the others"
    lines = [f"  | {line}" for line in ended.words.splitlines()]
    return "\n".join([f"{head}; its last lines:" if lines else f"{head}, and had said nothing", *lines])


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def main(argv: Sequence[str]) -> int:
    command, instead = list(argv), {}
    while command and command[0].startswith(_SIGNAL):
        one, _, other = command.pop(0).removeprefix(_SIGNAL).partition(":")
        instead[int(signal.Signals[f"SIG{one}"])] = int(signal.Signals[f"SIG{other}"])
    try:
        return Launching(command, instead).run()
    except OSError as error:
        name = command[0] if command else "no launcher is given"
        print(f"error: {name}: {error.strerror}; install it, or put it on the PATH", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
