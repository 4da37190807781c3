"""A rank of a pipeline: DeepSpeed's own schedule for its stage, instruction by instruction.

What an instruction sends follows DeepSpeed's engine (0.19.8, runtime/pipe/engine.py), which runs in no process alone:
activations and the number of their slot onwards, gradients back. Where every shard has all activations each sends its
part of them, after a description, and the parts are put together by an all-gather of the tensor group: behind the
receiver, and once more before backward, of gradients and of the activations themselves. What a stage receives has the
shape that its own flags say, whatever is sent to it; whether the two agree the replay tells (replay.py).
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_allattn.cluster.rehearsal.rank import META, RehearsedRank
from megatron_allattn.cluster.rehearsal.update import Update
from megatron_allattn.config import RunConfig
from megatron_allattn.engine.interface import Spans
from megatron_allattn.engine.pipeline_engine import Stage, from_last, schedule_without_step, tied_parameters
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.collectives import all_reduce
from megatron_allattn.parallel.groups import Groups
from megatron_allattn.parallel.silent import BACK, ONWARD, Script

LONG = 8  # bytes


class RehearsedStage(RehearsedRank):
    """See `RehearsedRank`; `network` is this stage's part."""

    def __init__(
        self, network: Network, run: RunConfig, groups: Groups, script: Script, update: Update, *, every: bool
    ) -> None:
        super().__init__(network, run, groups, script, update, every=every)
        self._stage, self._tied = Stage(network), tied_parameters(network, groups)
        self._parted = groups.tensor.size > 1 and not run.parallel.sequence_parallel
        self._of_buffer: dict[int, int] = {}  # which micro-batch a buffer holds
        self._inputs: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}

    def forward_backward(self, inputs: np.ndarray, targets: np.ndarray, step: int, spans: Spans) -> float:
        slots = list(self._micro_batches(step, spans))
        self._stage.contexts = [context for _, context in slots]
        self._batches = [(self._tensor(inputs[rows]), self._tensor(targets[rows])) for rows, _ in slots]
        self._arrived = 0
        for instructions in schedule_without_step(self.num_slots, self.groups.pipeline):
            for one in instructions:
                getattr(self, f"_do_{type(one).__name__}")(**one.kwargs)
        losses = [torch.zeros(())] * self.num_slots if self.network.part.last else []
        loss = self._mean_loss(losses) if losses else 0.0
        with self.script.within(None, "loss"):
            return from_last(loss, self.groups.pipeline, torch.device("cpu")).item()

    def _do_LoadMicroBatch(self, buffer_id: int) -> None:
        if self.network.part.first:
            self._begin(buffer_id)

    def _begin(self, buffer_id: int) -> int:
        """The next micro-batch comes into a buffer."""
        self._of_buffer[buffer_id] = slot = self._arrived
        self._arrived += 1
        return slot

    def _do_ForwardPass(self, buffer_id: int) -> None:
        slot = self._of_buffer[buffer_id]
        if slot not in self.real:
            return self._repeat(slot, "forward")
        with self._forward_of(slot):
            tokens, targets = self._batches[slot]
            if not self.network.part.first:
                tokens = self._inputs[slot] = self._expected().requires_grad_()
                self._gather(tokens)
            output, _ = self._stage((tokens, torch.tensor([slot])))
            if self.network.part.last:
                output = self._stage.loss((output, torch.tensor([slot])), targets) / self.num_slots
            self._outputs[slot] = output
        return None

    def _do_BackwardPass(self, buffer_id: int) -> None:
        slot = self._of_buffer[buffer_id]
        if slot not in self.real:
            return self._repeat(slot, "backward")
        with self._backward_of(slot):
            output = self._outputs[slot]
            if not self.network.part.last:
                self._gather(output)
                self._gather(output)
            output.backward(torch.empty_like(output))
        return None

    def _do_SendActivation(self, buffer_id: int) -> None:
        slot = self._of_buffer[buffer_id]
        self._pass_on(slot, "send", ONWARD, self._outputs[slot if slot in self.real else 0])

    def _do_RecvActivation(self, buffer_id: int) -> None:
        self._pass_on(self._begin(buffer_id), "recv", BACK, self._expected())

    def _do_SendGrad(self, buffer_id: int) -> None:
        slot = self._of_buffer[buffer_id]
        gradient = self._inputs[slot if slot in self.real else 0].grad
        assert gradient is not None, "what a stage has received gets no gradient"
        self._pass_on(slot, "send", BACK, gradient)

    def _do_RecvGrad(self, buffer_id: int) -> None:
        slot = self._of_buffer[buffer_id]
        self._pass_on(slot, "recv", ONWARD, self._outputs[slot if slot in self.real else 0])

    def _do_ReduceTiedGrads(self) -> None:
        with self.script.within(None, "gradients of weights that several stages hold"):
            for parameter, group in self._tied:
                if parameter.grad is not None:  # which `without_gradient` has
                    all_reduce(parameter.grad, group)

    def _do_ReduceGrads(self) -> None:
        self._average()

    def _expected(self) -> Tensor:
        """What comes from the stage before, as this rank's flags say."""
        tensor = self.groups.tensor.size if self.run.parallel.sequence_parallel else 1
        shape = (self.micro_batch_size, self._block // tensor, self.network.config.hidden_size)
        return torch.empty(shape, dtype=self.dtype, device=META)

    def _gather(self, hidden: Tensor) -> None:
        """The parts of hidden states, or of their gradient, are put together."""
        if self._parted:
            self.script.enter("tensor", "all_gather", hidden, module="parts of the hidden states")

    def _pass_on(self, slot: int, operation: str, towards: int, hidden: Tensor) -> None:
        """Hidden states or their gradient, to or from a neighbour."""
        activations = (operation == "send") == (towards == ONWARD)
        parts, of = self.groups.tensor.size if self._parted else 1, "activations" if activations else "gradients"
        where: dict[str, Any] = {"towards": towards}
        with self.script.within(slot, "forward" if activations else "backward"):
            if self._parted:  # 3, B, M, D, T, the rank, and T + 1 bounds
                description = LONG * (7 + parts)
                self.script.enter_bytes("pipeline", operation, description, module=f"shape of {of}", **where)
            shape, dtype = tuple(hidden.shape), str(hidden.dtype).removeprefix("torch.")
            size = hidden.numel() * hidden.element_size() // parts
            self.script.enter_bytes("pipeline", operation, size, shape=shape, dtype=dtype, module=of, **where)
            if activations:
                self.script.enter_bytes("pipeline", operation, LONG, module="slot", **where)
