"""One rank as a child: what it prints goes on, and how it ends is told to whoever started the launcher (launching.py).

    deepspeed, torchrun, mpirun, …  →  launch/rank.py  →  python pretrain.py ARGUMENTS

Launchers end all ranks once one has ended, each with words of its own, and none shows what that rank had said. This
process, which sees the end itself, kill -9 included, sends the last lines down standard error as marked lines
(`Ended`), through whatever lies between: pdsh, ssh, a daemon. Otherwise it is as if it were not there: streams,
arguments, signals and exit code (128 and the signal's number) are the rank's. It holds no torch.

No orphans: if this process is killed, the kernel kills the rank; if what reads its output is gone, or DeepSpeed's
launcher is, the rank gets SIGHUP, upon which a training saves and stops.
"""

import base64
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from megatron_allattn.config.processes import die_with_parent
from megatron_allattn.config.reporting import ENDS_FOR_ANOTHER, STOPPED
from megatron_allattn.parallel.launcher import deepspeed_launcher

MARK = "\x1erank-ended "
END = "\x1e"
PIECE = 2000
"""Characters of a marked line: what is written at once to a pipe (4096 bytes) is not mixed with others' words."""

KEPT_BYTES = 16_384  # of the last words
KEPT_LINES = 30
POLL_SECONDS = 0.5
DRAIN_SECONDS = 1.0  # for what a rank's own children still print after its end
SPEECH_SECONDS = 7.0
"""After a rank was killed the others find out who it was and say so (parallel/failures.py: 5 s), if they may."""

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_RANKS = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS")


@dataclass(frozen=True)
class Ended:
    """How a rank of `size` ended. code: of the process, -N for signal N; for_another: because of another rank, as it
    says; signalled: after it was asked to by a signal, as launchers do once one has ended."""

    rank: int
    size: int
    host: str
    code: int
    for_another: bool
    signalled: bool
    words: str

    def lines(self) -> list[str]:
        """As marked lines, short enough not to be torn."""
        packed = base64.b64encode(json.dumps(asdict(self)).encode()).decode()
        pieces = [packed[start : start + PIECE] for start in range(0, len(packed), PIECE)]
        key = f"{self.host}/{self.rank}/{os.getpid()}"
        return [f"{MARK}{key} {number} {len(pieces)} {piece}{END}\n" for number, piece in enumerate(pieces)]


class Collector:
    """Puts marked lines together again. ended: those that are whole, in the order of their ends."""

    def __init__(self) -> None:
        self.ended: list[Ended] = []
        self._pieces: dict[str, dict[int, str]] = {}

    def take(self, line: str) -> bool:
        """Whether there is a marked line in this one, which is not to be shown then."""
        _, mark, rest = line.partition(MARK)
        if not mark:
            return False
        with suppress(ValueError, TypeError, KeyError):  # not ours, or torn on its way
            key, number, count, piece = rest.partition(END)[0].split(" ")
            pieces = self._pieces.setdefault(key, {})
            pieces[int(number)] = piece
            if len(pieces) == int(count):
                packed = "".join(pieces[place] for place in sorted(self._pieces.pop(key)))
                self.ended.append(Ended(**json.loads(base64.b64decode(packed))))
        return True

    def first(self) -> Ended | None:
        """The rank that failed first: of those that nobody ended, else of those with their own words, else of all."""
        own = [one for one in self.ended if not one.for_another]
        return next((one for one in own if not one.signalled), next(iter(own or self.ended), None))

    def stopped(self) -> bool:
        """Whether all that have ended did as they were asked to, which is no failure: by a signal that came this way,
        or all ranks by one that did not."""
        asked = any(one.signalled or len(self.ended) == one.size for one in self.ended)
        return asked and all(one.code == STOPPED for one in self.ended)


class RankProcess:
    """A rank's process: what it runs, its streams and its end."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
        self._tail = bytearray()
        self._reader_gone = self._signalled = False
        self._launcher = deepspeed_launcher()
        told, tells = os.pipe()
        os.set_inheritable(tells, True)
        self._told = told
        self._rank, self._size = (
            next((int(environ[name]) for name in names if environ.get(name, "").isdecimal()), default)
            for names, default in ((_RANKS, 0), (_SIZES, 1))
        )
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environ) | {"PYTHONUNBUFFERED": "1", ENDS_FOR_ANOTHER: str(tells)},
            close_fds=False,  # MPI's daemon talks to the rank through a descriptor
            process_group=0,  # signals come from here alone, once
            preexec_fn=die_with_parent,
        )
        os.close(tells)
        for number in PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda signum, _: self._signal(signum))

    def _signal(self, number: int) -> None:
        if self._child.poll() is None:
            self._signalled = True
            self._child.send_signal(number)

    def run(self) -> int:
        """Until its end; the exit code."""
        self._relay()
        code = self._child.wait()
        for_another = bool(os.read(self._told, 1)) if select.select([self._told], [], [], 0)[0] else False
        if code != 0:
            words = "\n".join(self._tail.decode(errors="replace").splitlines()[-KEPT_LINES:])
            for line in self._ended(code, for_another, words).lines():
                self._write(2, line.encode())
        if code < 0:
            deadline = time.monotonic() + SPEECH_SECONDS
            while time.monotonic() < deadline and not self._reader_gone:
                time.sleep(0.05)
                self._check()
        return code if code >= 0 else 128 - code

    def _ended(self, code: int, for_another: bool, words: str) -> Ended:
        return Ended(self._rank, self._size, socket.gethostname(), code, for_another, self._signalled, words)

    def _relay(self) -> None:
        """Pass on what it prints until it has ended and all is said."""
        assert self._child.stdout is not None and self._child.stderr is not None
        ended: float | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(self._child.stdout, selectors.EVENT_READ, 1)
            selector.register(self._child.stderr, selectors.EVENT_READ, 2)
            while selector.get_map():
                for key, _ in selector.select(POLL_SECONDS if ended is None else 0.05):
                    piece = os.read(key.fd, 65_536)
                    if not piece:
                        selector.unregister(key.fileobj)
                        continue
                    self._write(key.data, piece)
                    self._tail += piece
                    del self._tail[:-KEPT_BYTES]
                self._check()
                if self._child.poll() is not None:
                    ended = time.monotonic() if ended is None else ended
                    if time.monotonic() - ended > DRAIN_SECONDS:
                        return

    def _check(self) -> None:
        """Tell the rank to stop, once, where nobody is there any more who would want it."""
        if self._reader_gone:
            return
        events = select.poll()
        for number in (1, 2):
            events.register(number, 0)  # of a pipe, socket or terminal whose other end is gone the kernel tells unasked
        gone = any(happened & (select.POLLERR | select.POLLHUP) for _, happened in events.poll(0))
        if gone or (self._launcher is not None and deepspeed_launcher() != self._launcher):
            self._reader_gone = True
            ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            self._signal(signal.SIGTERM if ignored else signal.SIGHUP)

    def _write(self, number: int, content: bytes) -> None:
        """All of it, unless nobody reads it any more."""
        left = memoryview(content)
        try:
            while left:
                left = left[os.write(number, left) :]
        except OSError:  # `_check` finds out whether the reader is gone
            return


def main(argv: Sequence[str]) -> int:
    """Run `python SCRIPT ARGUMENTS`. DeepSpeed puts --local_rank=N before them: it goes behind the script's name."""
    words = list(argv)
    added = [words.pop(0)] if words and words[0].startswith("--local_rank=") else []
    if not words:
        print("error: rank.py: give the script that is to run, and its arguments", file=sys.stderr)
        return 2
    return RankProcess([sys.executable, "-u", words[0], *added, *words[1:]]).run()
