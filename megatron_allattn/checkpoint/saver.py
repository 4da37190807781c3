"""Saving the steps of a run, at once or while training goes on.

With `async_save` (Megatron-LM's name) every rank copies what it gives of a checkpoint to host memory, and a thread
writes that, in a process group of its own, while the next steps are made. One save at a time: the next one waits for
it. What goes wrong on the thread is raised at the next step, on all ranks.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_allattn.checkpoint.save import write_step
from megatron_allattn.engine.drift import check_replicas
from megatron_allattn.engine.fragments import Fragment, Join, Stored
from megatron_allattn.engine.interface import Engine
from megatron_allattn.parallel.collectives import agree
from megatron_allattn.parallel.logical import LogicalTensor, Placement


class Saver:
    """Saves what `engine` holds in a run folder; `save` is collective.

    asynchronous: on a thread; section: in which everything is saved; after_commit: is called with the run folder, the
    step and how many seconds its save has taken on the first rank once that is complete.
    """

    def __init__(
        self,
        run_folder: Path,
        engine: Engine,
        *,
        asynchronous: bool,
        section: Callable[[], AbstractContextManager[None]] = nullcontext,
        after_commit: Callable[[Path, int, float], None],
    ) -> None:
        self._run_folder, self._engine, self._asynchronous = run_folder, engine, asynchronous
        self._section = section
        self._after_commit = after_commit
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._kept: dict[Stored, Tensor] = {}  # memory that has been touched once: to get it takes as long as to copy
        self._step = -1

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Save a step, or begin to, once the save before it has ended.

        Raises what has gone wrong with the save before it; Drift where replicas differ and StorageError, each on one
        rank (PeerFailed on the others), NotFinite on all where a tensor is not; of an asynchronous save `wait` does.
        """
        self.wait()
        began = time.monotonic()
        check_replicas(self._engine)
        engine, fragments = self._engine, list(self._engine.fragments())
        if self._asynchronous:
            fragments = [one.copied(self._kept.get(one.stored)) for one in fragments]
            self._kept = {one.stored: one.values for one in fragments}
        join = partial(_join, engine.network.placements)
        job = partial(self._write, step, fragments, join, state, began)
        self._step = step
        if self._asynchronous:
            self._thread = threading.Thread(target=self._run, args=(job,), name="save", daemon=True)
            self._thread.start()
        else:
            self._run(job)
            self.wait()

    @property
    def failed(self) -> bool:
        """Whether a save has gone wrong, which `wait` raises."""
        return self._error is not None

    def finished(self) -> int | None:
        """The step whose save has ended well since the last call, if one has."""
        if self._step < 0 or self.failed or (self._thread is not None and self._thread.is_alive()):
            return None
        step, self._thread, self._step = self._step, None, -1
        return step

    def wait(self) -> None:
        """Until nothing is being saved. Raises what has gone wrong with a save."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            error, self._error, self._step = self._error, None, -1
            raise error

    def _write(self, step: int, fragments: list[Fragment], join: Join, state: dict[str, Any], began: float) -> None:
        group = self._engine.groups.saving
        write_step(self._run_folder, step, fragments, join, state, group)
        seconds = time.monotonic() - began
        agree(lambda: self._after_commit(self._run_folder, step, seconds) if group.rank == 0 else None, group)

    def _run(self, job: Callable[[], None]) -> None:
        try:
            with self._section():
                job()
        except BaseException as error:  # whatever it is: `wait` raises it where it is seen
            self._error = error


def _join(placements: Sequence[Placement], logical: LogicalTensor, shards: list[Tensor]) -> Tensor:
    """With heads placed as they were when the shards were taken."""
    return logical.join(shards, None if logical.heads is None else placements[logical.heads.layer])
