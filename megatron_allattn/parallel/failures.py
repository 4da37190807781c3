"""How the failure of one rank becomes one message and the end of all.

Ranks tell each other through the store at which they have met, since collectives are what has failed:

- A rank that fails leaves a report (verdict.py) and a mark that there is one.
- A thread of every rank looks for the mark. It reports for a main thread that waits in a collective, which nothing else
  could wake before the time-out, and ends the process.
- When all have reported, or after `PATIENCE_SECONDS`, one rank speaks: that with an error of its own, else the lowest
  that is there. The others end once it has: many launchers end all ranks as soon as one has ended.
- Where the store is gone, so is what holds it (the first rank, or torchrun's agent): rank 1 says so, and the first rank
  of every other host, which cannot know whether rank 1 is there.

A launcher that sees a rank die ends the others with SIGTERM at once, hence it waits until they have spoken.
"""

import json
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from megatron_allattn.config.errors import one_line
from megatron_allattn.config.reporting import GRACE_SECONDS
from megatron_allattn.parallel.groups import Groups
from megatron_allattn.parallel.verdict import Report, kind_of, place, told, verdict, where_now, where_raised

POLL_SECONDS = 0.5
PATIENCE_SECONDS = 5.0
"""What a rank gets to report that another has failed, before it counts as gone."""

_FAILED, _TOLD, _SPEAKER = "failed", "told", "speaker"  # keys of the store
_ENDED = ("done", "left")  # of these with /RANK: whether it has ended well
_STOP = 0  # no signal's number


@dataclass(frozen=True)
class Ending:
    """How a failed run ends on this rank; `speaks`: whether the message is this rank's to print."""

    message: str
    speaks: bool
    exit_code: int


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
        self._taken = False
        self._main = threading.get_ident()

    def __enter__(self) -> "Watch":
        if self._size > 1:
            default: Any = dist.distributed_c10d._get_default_store()
            self._store = dist.PrefixStore("failures", default.clone())  # a connection of its own
            self._store.set_timeout(timedelta(seconds=PATIENCE_SECONDS))
            self._wake, self._bell = os.pipe()
            os.set_blocking(self._bell, False)
            self._handler = signal.signal(signal.SIGTERM, lambda *_: None)  # the thread acts on it: this one may wait
            signal.set_wakeup_fd(self._bell, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._look, name="failures", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._size > 1 and error is None:
            self._take_or_wait()
            os.write(self._bell, bytes([_STOP]))
            self._thread.join()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, self._handler)
            with suppress(RuntimeError):
                self._leave("done", range(self._size), self._seconds)

    def explain(self, error: BaseException, exit_code: int, *, says_all: bool) -> Ending:
        """What this rank's exception comes from. The same again for later calls; waits for the others' reports.

        says_all: the error's own words are the message, without the rank and the place that raised it.
        """
        if self._ending is None:
            words = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
            own = one_line(words if says_all else f"{type(error).__name__}: {words}")
            if self._size == 1:
                self._ending = Ending(own, True, exit_code)
            else:
                self._take_or_wait()
                kind, where = kind_of(error), where_raised(error, self._groups)
                message = f"rank {self._rank} ({place(self._groups, self._rank)}) failed {where}: {own}"
                self._ending = self._conclude(Report(kind, where, own if says_all else message, exit_code))
        return self._ending

    def told(self) -> None:
        """This rank has printed what it had to, or has nothing to print, and is about to end."""
        if self._size > 1:
            with suppress(RuntimeError):
                if self._ending is not None and self._ending.speaks:
                    self._store.set(_TOLD, "")
                self._leave("left", self._reports(), GRACE_SECONDS)

    def _take(self) -> bool:
        """Whether the caller, main thread or the other, is the first to end what goes on here, and hence the one."""
        with self._lock:
            first, self._taken = not self._taken, True
        return first

    def _take_or_wait(self) -> None:
        """For the main thread: where the other was first, the process is about to end."""
        if not self._take():
            threading.Event().wait()

    def _look(self) -> None:
        """The thread: until the bell rings for its end, or there is a reason to end the process."""
        end = math.inf
        with suppress(RuntimeError):  # the store is gone, which `_conclude` finds too
            while not self._store.check([_FAILED]):
                signals = os.read(self._wake, 64) if select.select([self._wake], [], [], POLL_SECONDS)[0] else b""
                if _STOP in signals:
                    return
                if signal.SIGTERM in signals:
                    end = min(end, time.monotonic() + GRACE_SECONDS)
                if time.monotonic() > end:  # no rank has failed: somebody wants an end
                    os._exit(128 + signal.SIGTERM)
        if self._take():
            ending = self._conclude(Report("there", where_now(self._groups, self._main)))
            self.last_words(ending)
            if ending.speaks:
                print(f"error: {ending.message}", file=sys.stderr, flush=True)
            self._ending = ending
            self.told()
            sys.stdout.flush()
            os._exit(ending.exit_code)

    def _conclude(self, report: Report) -> Ending:
        try:
            self._store.set(f"report/{self._rank}", json.dumps(asdict(report)))
            self._store.set(_FAILED, "")
        except RuntimeError:
            return self._without_store(report)
        try:
            reports = self._gather(report)
            return self._agree(reports, verdict(reports, self._size, self._seconds))
        except RuntimeError:  # the rank that holds it has ended, having heard of the failure: somebody has spoken
            return Ending("the run has failed on another rank", False, report.exit_code)

    def _gather(self, own: Report) -> dict[int, Report]:
        """Everyone's report; an error explains the rest, whose reports need not be waited for."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            reports = self._reports()
            complete = len(reports) == self._size or any(report.kind == "error" for report in reports.values())
            if complete or time.monotonic() > deadline:
                return reports
            time.sleep(0.05)

    def _reports(self) -> dict[int, Report]:
        found = {}
        for rank in range(self._size):
            if self._store.check([f"report/{rank}"]):
                found[rank] = Report(**json.loads(self._store.get(f"report/{rank}")))
            elif self._store.check([f"done/{rank}"]):
                found[rank] = Report("done")
        return found

    def _agree(self, reports: dict[int, Report], message: str) -> Ending:
        """Make one rank the speaker: the one that should be, or whoever has waited for it in vain."""
        errors = [rank for rank, report in reports.items() if report.kind == "error"]
        there = errors or [rank for rank, report in reports.items() if report.kind != "done"]
        exit_code = reports[min(errors)].exit_code if errors else 1
        deadline = time.monotonic() + (0.0 if self._rank == min(there) else PATIENCE_SECONDS)
        while time.monotonic() < deadline:
            if self._store.check([_TOLD]):
                return Ending(message, False, exit_code)
            time.sleep(0.05)
        return Ending(message, self._store.add(_SPEAKER, 1) == 1, exit_code)

    def _without_store(self, report: Report) -> Ending:
        if report.kind == "error":
            return Ending(report.message, True, report.exit_code)
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        gone = "the launcher on the first host" if agent else "rank 0"
        speaks = self._rank == 1 or os.environ["LOCAL_RANK"] == "0"
        if not speaks:
            time.sleep(GRACE_SECONDS)
        return Ending(f"{gone} is gone: {told({self._rank: report}, self._seconds)}", speaks, 1)

    def _leave(self, key: str, ranks: Iterable[int], seconds: float) -> None:
        """Say that this rank is about to end; the first, with which the store may end, waits for these others."""
        self._store.set(f"{key}/{self._rank}", "")
        deadline = time.monotonic() + seconds
        waiting = set(ranks) - {self._rank} if self._rank == 0 else set()
        while waiting and time.monotonic() < deadline:
            time.sleep(0.02)
            waiting = {rank for rank in waiting if not any(self._store.check([f"{key}/{rank}"]) for key in _ENDED)}
