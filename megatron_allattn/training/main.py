"""From a configuration to an exit code: join the other ranks, build the session, train, say how it ended.

Exit codes: 0 done; 2 the user's mistake; 3 stopped by a signal, with a checkpoint; 4 what is not finite; 1 anything
else; 128 and the number of a signal after which there was no time to stop. A user's mistake, a full disk or a port in
use is one line on the first rank that has it; what is nobody's mistake comes with its traceback. Of a run whose ranks
have lost each other one of them tells who is gone or who waited where (parallel/failures.py).
"""

import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch

from megatron_allattn.checkpoint.files import StorageError, storage_errors
from megatron_allattn.checkpoint.lock import RunLock
from megatron_allattn.checkpoint.run_folder import OUTCOME, End, Outcome, check_outside
from megatron_allattn.config import ParallelConfig, RunConfig, UsageError, check_world
from megatron_allattn.config.errors import as_mistake
from megatron_allattn.config.reporting import GRACE_SECONDS, STOPPED, ends_for_another
from megatron_allattn.engine.drift import Drift
from megatron_allattn.engine.finite import NotFinite
from megatron_allattn.parallel import discovery
from megatron_allattn.parallel.addresses import LaunchError, RankInfo
from megatron_allattn.parallel.collectives import PeerFailed, agree, gather_objects
from megatron_allattn.parallel.failures import Ending, Watch
from megatron_allattn.parallel.groups import Groups, close_groups, make_groups
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.parallel.verdict import kind_of
from megatron_allattn.training.loop import train
from megatron_allattn.training.own_folder import check_shared
from megatron_allattn.training.session import Session, exit_code, open_session

SAVING_SLACK_SECONDS = 30.0
"""How much longer the collectives of a save wait than its section lasts, which says more when it is over."""

SINK_SECONDS = 30.0
"""What TensorBoard and W&B get to write the rest once a run is done."""


def run_training(run: RunConfig, explicit: frozenset[str]) -> int:
    """Train as one rank of however many the launcher has started; returns the exit code."""
    return as_rank(
        lambda world_size: check_world(run, world_size),
        run.parallel,
        lambda groups, device, watch: _train(run, explicit, groups, device, watch),
    )


def as_rank(
    check: Callable[[int], None],
    parallel: ParallelConfig,
    body: Callable[[Groups, torch.device, Watch], int],
    meet: Callable[[RankInfo, ParallelConfig], tuple[Groups, torch.device]] | None = None,
) -> int:
    """Meet the other ranks, run `body` with the groups, this rank's device and the watch over the ranks, which gives
    the exit code, and report what goes wrong, on whichever rank.

    check: is given the number of processes and raises what is wrong with it, before the ranks wait for each other.
    meet: makes the groups and chooses the device, if not as a training does.
    Returns the exit code.
    """
    try:
        info = discovery.discover()
    except Exception as error:  # a wrong variable is this rank's own: each rank that has one says so
        return report_error(error, first=True)
    try:
        check(info.world_size)
        groups, device = (meet or _meet)(info, parallel)
    except Exception as error:
        return report_error(error, first=info.rank == 0 or isinstance(error, LaunchError))
    watch = Watch(groups, 60 * parallel.distributed_timeout_minutes)
    try:
        with watch:
            return body(groups, device, watch)
    except (Exception, KeyboardInterrupt) as error:
        return _report_failure(error, watch, groups)
    finally:
        close_groups()


def _ending(error: BaseException, watch: Watch) -> Ending:
    error = as_mistake(error)
    on_disk = isinstance(error, StorageError)
    return watch.explain(error, exit_code(error), says_all=_says_all(error), with_host=on_disk)


def _report_failure(error: BaseException, watch: Watch, groups: Groups) -> int:
    """Print what one rank prints for all, if it is this one; returns the exit code."""
    error, ending = as_mistake(error), _ending(error, watch)
    if ending.speaks:
        with_traceback = kind_of(error) == "error" and not _says_all(error)
        if with_traceback:
            traceback.print_exception(error)
        if groups.world.size > 1 or not with_traceback:
            print(f"error: {ending.message}", file=sys.stderr, flush=True)
    else:
        ends_for_another()
    watch.told()
    return ending.exit_code


def _train(run: RunConfig, explicit: frozenset[str], groups: Groups, device: torch.device, watch: Watch) -> int:
    session = lock = None
    watch.heed(60 * run.checkpoint.stop_deadline_minutes)
    own = run.checkpoint.save if groups.rank == 0 else None
    outcome = _LastWords(own if run.checkpoint.goes_on else None)
    try:
        with watch.section("in the start-up", run.parallel.startup_timeout_minutes):
            lock = agree(lambda: _take(own) if own is not None else None, groups.world, exit_code)
            _check_shared(run, groups)
            agree(outcome.forget, groups.world, exit_code)
            watch.last_words = outcome.write_failure
            session = open_session(run, explicit, groups, device, watch)
        outcome.of(session)
        if lock is not None:
            session.notes += lock.notes
            session.check_folder = lock.check
        train(session)
        gather_objects(None, groups.world)  # a rank that is gone by now is told of
        if session.stopping:
            outcome.write("stopped", signal.Signals(session.stopping).name)
            return STOPPED
        outcome.write("done", session.why_ended)
        session.metrics.close(SINK_SECONDS)
        return 0
    except (Exception, KeyboardInterrupt) as error:
        if lock is not None:
            outcome.write_failure(_ending(error, watch))
        raise
    finally:
        if session is not None:  # unless that is done: other ranks and launchers do not wait long
            session.metrics.close(GRACE_SECONDS)
        if lock is not None:
            lock.release()


def _take(run_folder: Path) -> RunLock:
    """The lock of a folder that a run may have. Raises UsageError."""
    check_outside("--save", run_folder)
    return RunLock(run_folder)


def _check_shared(run: RunConfig, groups: Groups) -> None:
    """Collective: all ranks share the folder of a run that is saved. Raises UsageError."""
    if run.checkpoint.save is not None and groups.world.size > 1:
        seconds = 60 * run.parallel.distributed_timeout_minutes
        check_shared(run.checkpoint.save, groups.world, lambda action: agree(action, groups.world, exit_code), seconds)


def _meet(info: RankInfo, parallel: ParallelConfig) -> tuple[Groups, torch.device]:
    """Choose this rank's device and make the process groups of a layout. Collective.

    Raises ValueError when the layout does not divide the world, LaunchError when the ranks do not meet.
    """
    device = discovery.select_device(info)
    seconds = 60 * parallel.distributed_timeout_minutes
    discovery.initialize(info, seconds, device)
    layout = Layout.from_world(
        info.world_size, parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    )
    saving = timedelta(minutes=parallel.save_timeout_minutes, seconds=SAVING_SLACK_SECONDS)
    return make_groups(layout, timedelta(seconds=seconds), saving), device


def report_error(error: BaseException, *, first: bool) -> int:
    """Say what went wrong before the ranks knew each other, if it is this rank's to say; returns the exit code.

    first: whether this rank speaks for an error that every rank has. The silent ones wait a moment, since many
    launchers end all ranks as soon as one has ended.
    """
    if isinstance(error, PeerFailed) or not first:
        ends_for_another()
        time.sleep(GRACE_SECONDS)
        return error.exit_code if isinstance(error, PeerFailed) else exit_code(error)
    error = as_mistake(error)
    if _says_all(error):
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
    return exit_code(error)


def _says_all(error: BaseException) -> bool:
    """Whether its message is all that is to be said, without a traceback."""
    return isinstance(error, UsageError | StorageError | Drift | NotFinite | LaunchError | KeyboardInterrupt)


class _LastWords:
    """outcome.json in the run folder, by the first rank: batch scripts decide by it.

    folder: of a run that goes on, whose outcome is told from the start; another one's only once it is known that it
    holds no other run (`of`). None on the other ranks.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._session: Session | None = None

    def forget(self) -> None:
        """There is none yet: that of an earlier start must not be taken for this one's. Raises StorageError."""
        if self._folder is not None:
            with storage_errors(self._folder / OUTCOME, 0):
                (self._folder / OUTCOME).unlink(missing_ok=True)

    def of(self, session: Session) -> None:
        """The start has gone well, and the folder is this run's."""
        self._session = session
        self._folder = session.run.checkpoint.save if session.first_rank else None
        self.forget()

    def write_failure(self, ending: Ending) -> None:
        self.write("guard" if ending.exit_code == NotFinite.exit_code else "failed", ending.message)

    def write(self, how: End, reason: str) -> None:
        if self._folder is None:
            return
        step = None if self._session is None else self._session.step
        try:
            Outcome(how=how, step=step, reason=reason).write(self._folder)
        except StorageError as error:
            print(f"warning: {OUTCOME}: {error}", file=sys.stderr, flush=True)
