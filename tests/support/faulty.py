"""`pretrain.py` with faults on one rank: `python faulty.py RANK FAULT@STEP[,FAULT@STEP…] [flags of pretrain.py]`.

The fault comes in this step (from 1), with a `-` after it in every one from there on; STEP may also be start,
evaluation (before every block of it), save, or, of the first rank, whose they are, commit or abort. At its beginning:

    kill       the process is gone, as by the kernel's memory killer
    raise      an exception
    unmatched  a collective of all ranks in which no other rank takes part
    stall      the process goes on, and does not come
    pause      it comes 3 seconds late
    limit      from then on no file may be larger than 20 KiB
    freeze     it is stopped, as by SIGSTOP

and while it is computed:

    nan        a gradient that is not a number, of the first tensor that this rank alone holds
    inf        an infinite loss
    times5     a loss five times as high
"""

import os
import resource
import signal
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pretrain
from megatron_allattn.config.reporting import run_program


def strike(engine: Any, fault: str) -> None:
    import torch

    from megatron_allattn.parallel.collectives import all_reduce

    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "raise":
        raise ArithmeticError("as if\na kernel had failed")
    elif fault == "unmatched":
        all_reduce(torch.ones(3), engine.groups.world)
    elif fault == "stall":
        time.sleep(1000)
    elif fault == "pause":
        time.sleep(3)
    elif fault == "limit":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20 * 1024, resource.RLIM_INFINITY))
    elif fault == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)


def spoiled_step(engine: Any, fault: str) -> AbstractContextManager[None]:
    from tests.support.spoiled import changed_loss, spoiled

    if fault == "nan":
        return spoiled(next(one for logical, one in engine.network.logical_parameters() if "query" in logical.name))
    if fault in ("inf", "times5"):
        return changed_loss(engine, lambda loss: loss * 5 if fault == "times5" else loss + float("inf"))
    return nullcontext()


def comes(step: str, number: int) -> bool:
    """Whether a fault of this STEP comes in this one."""
    if not step[0].isdigit():
        return False
    return number >= int(step[:-1]) if step.endswith("-") else number == int(step)


def main() -> int:
    from megatron_allattn.checkpoint import folder, save
    from megatron_allattn.engine.deepspeed_engine import DeepSpeedEngine

    rank, faults = int(sys.argv[1]), [fault.split("@") for fault in sys.argv[2].split(",")]
    true_step = DeepSpeedEngine.train_step

    def strikes_at(place: str, true: Any) -> Any:
        def method(self: DeepSpeedEngine, *arguments: Any) -> Any:
            for fault in [fault for fault, step in faults if step == place and self.groups.rank == rank]:
                strike(self, fault)
            return true(self, *arguments)

        return method

    def train_step(self: DeepSpeedEngine, inputs: Any, targets: Any, number: int, *rest: Any) -> Any:
        now = [fault for fault, step in faults if comes(step, number)] if self.groups.rank == rank else []
        for fault in now:
            strike(self, fault)
        with spoiled_step(self, now[0]) if now else nullcontext():
            return true_step(self, inputs, targets, number, *rest)

    DeepSpeedEngine.train_step = train_step  # type: ignore[method-assign]
    for place, name in (("start", "_allocate_state"), ("evaluation", "evaluate_block"), ("save", "fragments")):
        setattr(DeepSpeedEngine, name, strikes_at(place, getattr(DeepSpeedEngine, name)))

    def late(place: str, true: Any) -> Any:
        def function(*arguments: Any, **options: Any) -> Any:
            for fault in [fault for fault, step in faults if step == place]:
                strike(None, fault)
            return true(*arguments, **options)

        return function

    if any(fault == "limit" for fault, _ in faults):  # a file that is too large on every rank
        save.plan = partial(save.plan, max_bytes=40_000)
    for place in ("commit", "abort"):
        setattr(folder, place, late(place, getattr(folder, place)))
    return pretrain.main(sys.argv[3:])


if __name__ == "__main__":
    run_program(main)
