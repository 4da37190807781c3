"""How the failure of one rank becomes one message and the end of all.

Ranks tell each other through the store at which they have met, since collectives are what has failed:

- A rank that fails leaves a report (verdict.py) and a mark that there is one. So does one that gets SIGTERM, if none
  has failed a moment later: launchers send it to all ranks once one has ended, batch systems when time is up.
- A run that can stop by itself asks for `heed`: then SIGTERM, SIGUSR1 and SIGHUP only ask it to, and all ranks are
  called. If they all answer, it has its time for that; where one is gone, or the time is over, it ends as above. A
  launcher that is gone counts as a SIGHUP (launcher.py).
- What takes longer than its `section` may is a failure of the rank that finds it. Then, and where a collective has
  waited too long, every rank prints what its threads are at.
- A thread of every rank looks for the mark. It reports for a main thread that waits in a collective, which nothing else
  could wake before the time-out, and ends the process.
- When all have reported, or after `PATIENCE_SECONDS`, one rank speaks: that with an error of its own, else the lowest
  that is there. The others end once it has: many launchers end all ranks as soon as one has ended.
- Where the store is gone or frozen, so is what holds it (the first rank, or torchrun's agent): rank 1 says so, and the
  first rank of every other host, which cannot know whether rank 1 is there.

Nothing here waits for ever: every answer of the store has a limit (board.py), and so has what SIGTERM has to wait for.
"""

import faulthandler
import json
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

import torch.distributed as dist

from megatron_allattn.config.errors import one_line
from megatron_allattn.config.reporting import GRACE_SECONDS, ends_for_another
from megatron_allattn.parallel.addresses import LaunchError
from megatron_allattn.parallel.board import Board, Silent
from megatron_allattn.parallel.groups import Groups
from megatron_allattn.parallel.launcher import deepspeed_launcher
from megatron_allattn.parallel.verdict import Report, kind_of, place, told, verdict, where_now, where_raised

POLL_SECONDS = 0.5
PATIENCE_SECONDS = 5.0
"""What a rank gets to report that another has failed, before it counts as gone."""

ANSWER_SECONDS = 10.0
"""What the store gets for an answer, before it counts as gone."""

SPEECH_SECONDS = 30.0
"""Once a rank has failed, SIGTERM waits this long for what is to be said about it."""

_FAILED, _TOLD, _SPEAKER, _CALLED = "failed", "told", "speaker", "called"  # keys of the store
_HERE = "here"  # with /RANK: it has answered a call
_ENDED = ("done", "left")  # of these with /RANK: whether it has ended well
_STOP = 0  # no signal's number
_HEEDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_TOO_LONG = ("stuck", "late")  # kinds of reports


@dataclass(frozen=True)
class Section:
    """A part of a run, `in the step`, how many seconds it may take, and when they are over."""

    name: str
    seconds: float
    deadline: float


@dataclass(frozen=True)
class Ending:
    """How a failed run ends on this rank.

    speaks: whether the message is this rank's to print; explained: whether it is an error of a rank's own.
    """

    message: str
    speaks: bool
    exit_code: int
    explained: bool = False


class Watch:
    """Use it in `with` around what the ranks do together. seconds: the time-out of collectives.

    last_words: called where the process ends while its main thread waits in a collective.
    """

    def __init__(self, groups: Groups, seconds: float) -> None:
        self.last_words: Callable[[Ending], None] = lambda ending: None
        self._groups, self._seconds = groups, seconds
        self._rank, self._size = groups.rank, groups.world.size
        self._lock = threading.Lock()
        self._ending: Ending | None = None
        self._taker: int | None = None
        self._reporters: list[int] = []
        self._main = threading.get_ident()
        self._limit: float | None = None
        self._signal = 0
        self._sections: dict[int, Section] = {}  # by thread
        self._failed_in = ""
        self._handlers: dict[signal.Signals, Any] = {}
        self._launcher = deepspeed_launcher()

    def __enter__(self) -> "Watch":
        if self._size > 1:
            try:
                self._board = Board("failures", ANSWER_SECONDS)
            except Exception as error:
                self._size = 1  # it cannot hear the others, nor be heard: it speaks for itself alone
                why = f"rank {self._rank} cannot connect once more to where the ranks have met"
                raise LaunchError(one_line(f"{why}: {type(error).__name__}: {error}; start the run again")) from error
            self._start()
        return self

    @property
    def signal(self) -> int:
        """The number of the signal that this process has got first, 0 for none."""
        return self._signal

    @contextmanager
    def section(self, name: str, minutes: float) -> Iterator[None]:
        """What this thread does in here is told by this name (`in the step`), and may take so long."""
        thread = threading.get_ident()
        outer, seconds = self._sections.get(thread), 60 * minutes
        self._sections[thread] = Section(name, seconds, time.monotonic() + seconds)
        try:
            yield
        except BaseException:
            self._failed_in = self._failed_in or name
            raise
        finally:
            if outer is None:
                del self._sections[thread]
            else:
                self._sections[thread] = outer

    def heed(self, seconds: float) -> None:
        """From now on SIGTERM, SIGUSR1 and SIGHUP (unless it is ignored, as under nohup) ask the run to stop, which has
        `seconds` to do so."""
        self._limit = seconds
        if self._size == 1:
            self._start()
        for number in (signal.SIGUSR1, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, lambda *_: None)

    def _start(self) -> None:
        self._wake, self._bell = os.pipe()
        os.set_blocking(self._bell, False)
        # the thread acts on signals: the main one may be waiting in a collective
        self._handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._look, name="failures", daemon=True)
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None or not self._handlers:
            return
        self._take_or_wait()
        os.write(self._bell, bytes([_STOP]))
        self._thread.join()
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._wake)
        os.close(self._bell)
        if self._size > 1:
            self._leave("done", range(self._size), PATIENCE_SECONDS)

    def explain(self, error: BaseException, exit_code: int, *, says_all: bool, with_host: bool = False) -> Ending:
        """What this rank's exception comes from. The same again for later calls; waits for the others' reports.

        says_all: the error's own words are the message, without the rank and the place that raised it; with_host: the
        rank and its host come after them where there are several.
        """
        if self._ending is None:
            words = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
            own = one_line(words if says_all else f"{type(error).__name__}: {words}")
            if self._size == 1:
                self._ending = Ending(own, True, exit_code)
            else:
                self._take_or_wait()
                own += f" (rank {self._rank} on {socket.gethostname()})" if with_host else ""
                kind, where = kind_of(error), where_raised(error, self._groups)
                message = f"rank {self._rank} ({place(self._groups, self._rank)}) failed {where}: {own}"
                where += f", {self._failed_in}" if self._failed_in else ""
                self._ending = self._conclude(Report(kind, where, own if says_all else message, exit_code))
        return self._ending

    def told(self) -> None:
        """This rank has printed what it had to, or has nothing to print, and is about to end."""
        if self._size == 1 or self._ending is None:
            return
        if self._ending.speaks:
            with suppress(RuntimeError):
                self._board.ask(lambda store: store.set(_TOLD, ""))
        # After an error a rank that is late may be about to find the same; after a death the dead need no waiting for.
        explained = self._ending.explained
        ranks, seconds = (range(self._size), PATIENCE_SECONDS) if explained else (self._reporters, GRACE_SECONDS)
        self._leave("left", ranks, seconds)

    def _take(self) -> bool:
        """Whether the caller, main thread or the other, is the first to end what goes on here, and hence the one."""
        with self._lock:
            self._taker = self._taker or threading.get_ident()
        return self._taker == threading.get_ident()

    def _take_or_wait(self) -> None:
        """For the main thread: where the other was first, the process is about to end."""
        if not self._take():
            threading.Event().wait()

    def _look(self) -> None:
        """The thread: until the bell rings for its end, or there is a reason to end the process."""
        wanted, called, answered = math.inf, False, False
        marks = self._board.begin(_marks) if self._size > 1 else Future()
        while True:
            signals = os.read(self._wake, 64) if select.select([self._wake], [], [], POLL_SECONDS)[0] else b""
            if _STOP in signals:
                return
            caught = [one for one in signals if one in _HEEDED]
            if self._launcher is not None and deepspeed_launcher() != self._launcher:
                caught.append(signal.SIGHUP)
            if caught and not self._signal:
                self._signal, wanted = caught[0], time.monotonic()
                if self._limit is not None and self._size > 1:
                    self._board.begin(lambda store: store.set(_CALLED, ""))
            if marks.done() and self._taker is None:
                if marks.exception() is not None:  # the store is gone, which `_conclude` finds too
                    self._end(Report("there", self._where()))
                elif (kind := marks.result().get(_FAILED)) is not None:
                    if kind in _TOO_LONG:
                        self._dump()
                    self._end(Report("there", self._where()))
                elif _CALLED in marks.result() and not answered:
                    answered = True
                    self._board.begin(lambda store: store.set(f"{_HERE}/{self._rank}", ""))
                marks = self._board.begin(_marks)
            now, sections = time.monotonic(), list(self._sections.items())
            if self._taker is None and (late := [(thread, one) for thread, one in sections if now > one.deadline]):
                thread, section = late[0]
                where = self._where(thread)  # before stacks are printed, which takes a while
                self._dump()
                self._end(Report("stuck", where, f"{section.name} for {section.seconds:g} s"))
            waited, limit = time.monotonic() - wanted, GRACE_SECONDS if self._limit is None else self._limit
            if waited > max(limit, SPEECH_SECONDS) + (0.0 if self._limit is None else SPEECH_SECONDS):
                os._exit(128 + self._signal)
            if waited > limit:
                self._end(self._ended(limit))
            elif waited > PATIENCE_SECONDS and self._size > 1 and not called:
                called = True
                if not self._all_here():
                    self._end(self._ended(PATIENCE_SECONDS))

    def _ended(self, seconds: float) -> Report:
        """That this process is ended by a signal, so long after it."""
        name = signal.Signals(self._signal).name
        late = "" if self._limit is None else f" and had not stopped after {seconds:g} s"
        return Report("ended", self._where(), name + late, 128 + self._signal)

    def _where(self, thread: int | None = None) -> str:
        """Where a thread is, the main one unless another is given, and in which section."""
        thread = thread or self._main
        section = self._sections.get(thread)
        where = where_now(self._groups, thread, alone=thread != self._main)
        return where + (f", {section.name}" if section is not None else "")

    def _dump(self) -> None:
        """Print what every thread of this process is at."""
        print(f"rank {self._rank}: its threads, the last call first", file=sys.stderr, flush=True)
        with suppress(OSError, ValueError):  # standard error may be anything
            faulthandler.dump_traceback(sys.stderr.fileno())

    def _all_here(self) -> bool:
        """Whether all ranks have answered the call, or have ended."""
        try:
            return self._board.ask(lambda store: _answered(store, self._size))
        except RuntimeError:
            return False

    def _end(self, report: Report) -> None:
        """For the thread: end the process, unless the main thread is about to."""
        if not self._take():
            return
        ending = self._ending = self._conclude(report)
        self.last_words(ending)
        if ending.speaks:
            print(f"error: {ending.message}", file=sys.stderr, flush=True)
        else:
            ends_for_another()
        self.told()
        sys.stdout.flush()
        os._exit(ending.exit_code)

    def _conclude(self, report: Report) -> Ending:
        if self._size == 1:
            return Ending(verdict({0: report}, 1, self._seconds), True, report.exit_code)
        heard = False
        try:
            self._board.ask(lambda store: _publish(store, self._rank, report))
            heard = True
            return self._agree(report, self._gather())
        except Silent:
            return self._without_store(report, "does not answer")
        except RuntimeError:
            if heard:  # the rank that holds it has ended, having heard of the failure: somebody has spoken
                return Ending("the run has failed on another rank", False, report.exit_code)
            return self._without_store(report, "is gone")

    def _gather(self) -> dict[int, Report]:
        """Everyone's report; an error explains the rest, whose reports need not be waited for."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            reports = self._board.ask(lambda store: _reports(store, self._size))
            complete = len(reports) == self._size or any(report.kind == "error" for report in reports.values())
            if complete or time.monotonic() > deadline:
                return reports
            time.sleep(0.05)

    def _agree(self, own: Report, reports: dict[int, Report]) -> Ending:
        """Make one rank the speaker: the one that should be, or whoever has waited for it in vain."""
        self._reporters = list(reports)
        message = verdict(reports, self._size, self._seconds)
        errors = [rank for rank, report in reports.items() if report.kind == "error"]
        there = errors or [rank for rank, report in reports.items() if report.kind != "done"]
        exit_code = reports[min(errors)].exit_code if errors else own.exit_code
        deadline = time.monotonic() + (0.0 if self._rank == min(there) else PATIENCE_SECONDS)
        while time.monotonic() < deadline:
            if self._board.ask(lambda store: store.check([_TOLD])):
                return Ending(message, False, exit_code, bool(errors))
            time.sleep(0.05)
        speaker = self._board.ask(lambda store: store.compare_set(_SPEAKER, "", str(self._rank)))
        return Ending(message, int(speaker) == self._rank, exit_code, bool(errors))

    def _without_store(self, report: Report, how: str) -> Ending:
        if report.kind == "error":
            return Ending(report.message, True, report.exit_code)
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        holder = "the launcher on the first host" if agent else "rank 0"
        speaks = self._rank == 1 or os.environ["LOCAL_RANK"] == "0"
        if not speaks:
            time.sleep(GRACE_SECONDS)
        return Ending(f"{holder} {how}: {told({self._rank: report}, self._seconds)}", speaks, report.exit_code)

    def _leave(self, key: str, ranks: Iterable[int], seconds: float) -> None:
        """Say that this rank is about to end; the first, with which the store may end, waits for these others."""
        with suppress(RuntimeError):
            self._board.ask(lambda store: store.set(f"{key}/{self._rank}", ""))
            deadline = time.monotonic() + seconds
            waiting = set(ranks) - {self._rank} if self._rank == 0 else set()
            while waiting and time.monotonic() < deadline:
                time.sleep(0.02)
                waiting -= self._board.ask(lambda store: _gone(store, self._size))


def _marks(store: dist.Store) -> dict[str, str]:
    """Those that there are: the kind of the first failure, and whether all have been called."""
    return {mark: store.get(mark).decode() for mark in (_FAILED, _CALLED) if store.check([mark])}


def _answered(store: dist.Store, size: int) -> bool:
    keys = (_HERE, *_ENDED)
    return all(any(store.check([f"{key}/{rank}"]) for key in keys) for rank in range(size))


def _publish(store: dist.Store, rank: int, report: Report) -> None:
    """Leave a report and the mark, and make sure that they have arrived: `set` alone waits for nothing."""
    store.set(f"report/{rank}", json.dumps(asdict(report)))
    store.compare_set(_FAILED, "", report.kind)
    store.check([_FAILED])


def _reports(store: dist.Store, size: int) -> dict[int, Report]:
    found = {}
    for rank in range(size):
        if store.check([f"report/{rank}"]):
            found[rank] = Report(**json.loads(store.get(f"report/{rank}")))
        elif store.check([f"done/{rank}"]):
            found[rank] = Report("done")
    return found


def _gone(store: dist.Store, size: int) -> set[int]:
    """Ranks that have said that they end."""
    return {rank for rank in range(size) if any(store.check([f"{key}/{rank}"]) for key in _ENDED)}
