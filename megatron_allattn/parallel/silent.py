"""Process groups of ranks that are not there: one process plays any rank of a large job, and what the rank would send
is written down instead.

    script = Script()
    groups = silent_groups(layout, rank, script)
    ...                                          # what the rank does, on tensors without memory
    script.calls                                 # every collective that it has called, in order

Everything above torch.distributed is the code that trains: collectives.py calls torch's functions, and only the process
group behind them is another. It leaves results as if every rank had what this one has. An operation that it does not
know is an error of torch, never passed over in silence.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_allattn.parallel.groups import ALONE, Group, Groups
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.parallel.ledger import groups_by_name

ONWARD, BACK = 1, -1  # to the next stage of a pipeline, and to the one before


@dataclass(frozen=True)
class Call:
    """One message of a rank: of a collective in the group of this name, or to or from a neighbouring stage.

    num_bytes: of the whole message, as a ledger counts them (ledger.py); shape, dtype: of the tensor that the rank
    gives, as far as it is known; micro_batch, direction, module: where in the step it is called; towards: of `send` and
    `recv`, `ONWARD` or `BACK`.
    """

    group: str
    operation: str
    num_bytes: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    micro_batch: int | None = None
    direction: str = ""
    module: str = ""
    towards: int = 0

    @property
    def place(self) -> str:
        """Where in the step, in words."""
        return _place(self.micro_batch, self.direction, self.module)

    @property
    def what(self) -> str:
        """The operation and what it is given, in words."""
        size = f"{list(self.shape)} {self.dtype}" if self.shape else f"{self.num_bytes:,} bytes"
        return f"{self.operation} of {size}"


class Script:
    """What one rank calls in a step, in order. module_now: the name of the module that calls, asked at every call."""

    def __init__(self, module_now: Callable[[], str] = lambda: "") -> None:
        self.calls: list[Call] = []
        self.module_now = module_now
        self._micro_batch: int | None = None
        self._direction = ""

    @contextmanager
    def within(self, micro_batch: int | None, direction: str) -> Iterator[list[Call]]:
        """Calls inside are of this micro-batch and direction; gives a list that has them afterwards."""
        before, first, own = (self._micro_batch, self._direction), len(self.calls), list[Call]()
        self._micro_batch, self._direction = micro_batch, direction
        yield own  # where it fails the place stays, to be told
        self._micro_batch, self._direction = before
        own += self.calls[first:]

    def enter(
        self, group: str, operation: str, tensor: Tensor, *, times: int = 1, module: str = "", towards: int = 0
    ) -> None:
        """Write down a call that is given `tensor`. times: how much larger the whole message is than it."""
        self.enter_bytes(
            group,
            operation,
            times * tensor.numel() * tensor.element_size(),
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            module=module or self.module_now(),
            towards=towards,
        )

    def enter_bytes(
        self,
        group: str,
        operation: str,
        num_bytes: int,
        *,
        shape: tuple[int, ...] = (),
        dtype: str = "",
        module: str = "",
        towards: int = 0,
    ) -> None:
        """Write down a call of which no more is known than is said."""
        place = self._micro_batch, self._direction
        self.calls.append(Call(group, operation, num_bytes, shape, dtype, *place, module, towards))

    @property
    def place(self) -> str:
        """Where in the step the rank is, in words."""
        return _place(self._micro_batch, self._direction, self.module_now())


def _place(micro_batch: int | None, direction: str, module: str) -> str:
    slot = [] if micro_batch is None else [f"micro-batch {micro_batch}"]
    return ", ".join([*slot, *(part for part in (direction, module) if part)])


class _Done:
    """What torch waits for."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class SilentGroup(dist.ProcessGroup):
    """The group of this name as one of its ranks sees it; writes every collective into `script`."""

    def __init__(self, name: str, rank: int, size: int, script: Script) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # without a store, which is for real ranks
        self._name, self._size, self._script = name, size, script

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        kind = "sum" if opts is None else _reduction(opts.reduceOp)
        self._script.enter(self._name, "all_reduce" if kind == "sum" else f"all_reduce ({kind})", tensors[0])
        return _Done()

    def allgather(self, outputs: Any, inputs: Sequence[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        self._script.enter(self._name, "all_gather", inputs[0], times=self._size)
        for part in outputs[0]:
            part.copy_(inputs[0])
        return _Done()

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Any, opts: Any = None) -> _Done:  # type: ignore[override]
        self._script.enter(self._name, "reduce_scatter", outputs[0], times=self._size)
        outputs[0].copy_(inputs[0][0])
        return _Done()

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> _Done:  # type: ignore[override]
        self._script.enter(self._name, "broadcast", tensors[0])
        return _Done()


def _reduction(op: Any) -> str:
    names = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
    return next((name for name, known in names.items() if op == known), "another reduction")


def silent_groups(layout: Layout, rank: int, script: Script) -> Groups:
    """The groups of any rank of `layout`, none of whose ranks need be there; there is none for checkpoints."""
    named = groups_by_name(layout, rank)

    def group(name: str) -> Group:
        ranks = named[name]
        place = ranks.index(rank)
        return Group(ranks, place, SilentGroup(name, place, len(ranks), script) if len(ranks) > 1 else None)

    names = ("world", "tensor", "data", "pipeline", "ends")
    return Groups(layout=layout, rank=rank, saving=ALONE, **{name: group(name) for name in names})
