"""`pretrain.py` with a fault on one rank: `python faulty.py RANK STEP FAULT [flags of pretrain.py]`.

The fault comes at the beginning of a step (from 1), `nan` in its backward pass:

    kill       the process is gone, as by the kernel's memory killer
    raise      an exception
    nan        a gradient that is not a number, of the first tensor that this rank alone holds
    unmatched  a collective of all ranks in which no other rank takes part
    stall      the process goes on, and does not come
"""

import os
import signal
import sys
import time
from typing import Any

import pretrain
from megatron_allattn.config.reporting import run_program


def strike(engine: Any, fault: str) -> None:
    import torch

    from megatron_allattn.parallel.collectives import all_reduce
    from tests.support.spoiled import spoil

    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "raise":
        raise ArithmeticError("as if\na kernel had failed")
    elif fault == "nan":
        weight = next(one for logical, one in engine.network.logical_parameters() if "query" in logical.name)
        spoil(weight)
    elif fault == "unmatched":
        all_reduce(torch.ones(3), engine.groups.world)
    elif fault == "stall":
        time.sleep(1000)
    else:
        raise ValueError(fault)


def main() -> int:
    from megatron_allattn.engine.deepspeed_engine import DeepSpeedEngine

    rank, step, fault = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    true_step = DeepSpeedEngine.train_step

    def train_step(self: DeepSpeedEngine, inputs: Any, targets: Any, number: int, *rest: Any) -> Any:
        if number == step and self.groups.rank == rank:
            strike(self, fault)
        return true_step(self, inputs, targets, number, *rest)

    DeepSpeedEngine.train_step = train_step  # type: ignore[method-assign]
    return pretrain.main(sys.argv[4:])


if __name__ == "__main__":
    run_program(main)
