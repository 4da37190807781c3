"""How a rank ends: one line for a user's mistake, on one rank, and an exit code that holds (all without torch).

What a program prints is a convenience, never a reason to lose its work: a reader that is gone (`| head`), a full disk
or a closed descriptor (`>&-`) ends the printing and nothing else.
"""

import atexit
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from types import TracebackType
from typing import Any, NoReturn, TextIO, cast

from megatron_allattn.config.errors import UsageError, as_mistake

GRACE_SECONDS = 2.0
"""What the rank with the message gets to print it before a launcher that sees another rank end ends them all."""

MAY_HANG = "may hang: "
"""How names of threads begin that may stand still for ever, and with them exit handlers of what they have called."""

EXIT_SECONDS = 10.0
"""What exit handlers get to end where there is such a thread, before the process ends without them."""

ENDS_FOR_ANOTHER = "ALLATTN_ENDS_FOR_ANOTHER"
"""The variable with the descriptor by which a rank tells what has started it that it ends because of another rank."""

STOPPED = 3
"""Exit code of a training that was asked to stop and has saved."""

NEEDED = ("deepspeed", "numpy", "torch", "tqdm", "tyro")
"""Packages that no program does without for long."""

_RANK_VARIABLES = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK")


def first_rank_guess() -> bool:
    """Whether this process is rank 0 as far as the environment tells (no MPI call, never an error)."""
    environ = os.environ
    in_slurm_step = bool(environ.get("SLURM_PROCID") and environ.get("SLURM_STEP_ID"))
    names = [*_RANK_VARIABLES, *(["SLURM_PROCID"] if in_slurm_step else [])]
    return next((environ[name] for name in names if environ.get(name)), "0") == "0"


def refuse(error: Exception) -> int:
    """Report a mistake that every rank has found: the first prints it, the others wait a moment. Exit code 2."""
    if first_rank_guess():
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        ends_for_another()
        time.sleep(GRACE_SECONDS)
    return 2


def ends_for_another() -> None:
    """Tell what has started this rank, if it wants to know (cluster/nodes/rank_process.py), that another rank's end is
    what is to be looked at."""
    descriptor = os.environ.pop(ENDS_FOR_ANOTHER, "")
    if descriptor.isdecimal():
        with suppress(OSError):
            os.write(int(descriptor), b".")


def interrupted() -> int:
    """Report Ctrl-C (SIGINT), once where several ranks get it. Exit code 1."""
    if first_rank_guess():
        print("error: interrupted", file=sys.stderr, flush=True)
    return 1


def tell_early_ends() -> None:
    """For a program that imports torch or numpy itself: an interruption or a lack of them before `run_program` is one
    line too."""

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            os._exit(interrupted())
        if isinstance(error, ModuleNotFoundError) and error.name in NEEDED:
            os._exit(_lacking(error.name))
        sys.__excepthook__(kind, error, traceback)

    sys.excepthook = hook


def _lacking(package: str) -> int:
    rule = (
        "is not installed in this environment; activate the project's (. .venv/bin/activate), which `make venv` makes"
    )
    return refuse(UsageError(f"{sys.executable}: {package} {rule}"))


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Processes that are started in here get no Ctrl-C: their parent tells of it, and ends them."""
    resource_tracker.ensure_running()  # started by the first process otherwise, and then it lets interrupts through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run a program and end the process with the exit code of `main`, or of the SystemExit that it raises.

    What `main` does not treat itself is told in one line where it is an interruption, such as one while it loads torch,
    a path that cannot be used, or a Python without the packages that every environment of the project has.

    While it runs, printing raises no OSError. Output that nobody reads any more is no fault; any other failure to print
    is told in one line on stderr at the end and turns exit code 0 into 1, unless `tell_lost_output` has told it before.

    Where torch is not loaded yet, its own log starts at errors (it tells of a rank that is gone with a page of C++).
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    output = Output(sys.stdout, 1)
    sys.stdout, sys.stderr = cast(TextIO, output), cast(TextIO, Output(sys.stderr, 2))
    try:
        code = main()
    except SystemExit as end:  # --help, and signal handlers
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        code = interrupted()
    except ModuleNotFoundError as error:
        if error.name not in NEEDED:
            raise
        code = _lacking(error.name)
    except OSError as error:
        if not isinstance(mistake := as_mistake(error), UsageError):
            raise
        code = refuse(mistake)
    output.flush()
    if output.failure is not None and not isinstance(output.failure, BrokenPipeError):
        print(f"error: standard output: {output.failure.strerror}", file=sys.stderr)
        code = code or 1
    _leave(code)


def tell_lost_output() -> None:
    """Warn, once and on stderr, if standard output has failed; the program goes on without, and that is no error."""
    output = sys.stdout
    if isinstance(output, Output) and output.failure is not None:
        why, output.failure = output.failure.strerror, None
        print(f"warning: standard output failed and gets no more lines ({why})", file=sys.stderr, flush=True)


def _leave(code: int) -> NoReturn:
    """End the process with `code`, after its exit handlers and without the interpreter's tear-down.

    A thread of gloo that is still at work then can abort the process ("terminate called without an active exception"),
    which turned about one exit in ten of a first rank into 134 (seen with torch 2.13 on 2 loaded cores).
    """
    if any(thread.name.startswith(MAY_HANG) for thread in threading.enumerate()):
        timer = threading.Timer(EXIT_SECONDS, os._exit, (code,))
        timer.daemon = True
        timer.start()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Output:
    """A standard stream whose writing never raises an OSError: the first one is kept, what follows it is dropped.

    failure: what went wrong and has not been told yet.
    """

    def __init__(self, stream: TextIO | None, descriptor: int) -> None:
        self._stream = _closed_stream(descriptor) if stream is None else stream
        if isinstance(self._stream, io.TextIOWrapper):  # a terminal without × is no reason to fail either
            self._stream.reconfigure(errors="backslashreplace")
        self._lost = False
        self.failure: OSError | None = None

    def write(self, text: str) -> int:
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, action: Callable[[], object]) -> None:
        if not self._lost:
            try:
                action()
            except OSError as error:
                self._lost, self.failure = True, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _closed_stream(descriptor: int) -> TextIO:
    """In place of a stream that was closed before the start, for which Python has None: writing to it fails.

    It takes the descriptor, so that no file opened later gets that number and, with it, what libraries print.
    """
    nothing = os.open(os.devnull, os.O_RDONLY)
    if nothing != descriptor:
        os.dup2(nothing, descriptor)
        os.close(nothing)
    return open(descriptor, "w")
