"""One rank's training step, on tensors without memory: which messages it sends, in which order.

The network, its attention sublayers, the caches, the loss over the global batch and the step around them are the code
that trains, and so are autograd and, in a pipeline, DeepSpeed's schedule (pipeline.py). What stands in for something:
silent process groups (parallel/silent.py), attention of which shapes alone are real (kernels/outline.py) unless the
backend is `eager`, and for DeepSpeed's own messages their prediction (update.py). The step is one of a run under way:
caches are full, and DeepSpeed has told neighbours the shapes that it tells them once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from megatron_allattn.cluster.rehearsal.places import Places
from megatron_allattn.cluster.rehearsal.update import Update
from megatron_allattn.config import RunConfig
from megatron_allattn.engine.interface import precision_of
from megatron_allattn.engine.plain import PlainEngine
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.attention import BlockContext
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.groups import Groups
from megatron_allattn.parallel.host_ids import HostIds
from megatron_allattn.parallel.logical import LogicalTensor
from megatron_allattn.parallel.silent import Call, Script

META = torch.device("meta")
STEP = 1


class RehearsedRank(PlainEngine):
    """See `Engine`; computes nothing. every: also the micro-batches between the first and the last, which else are
    taken to call what the first calls."""

    def __init__(
        self, network: Network, run: RunConfig, groups: Groups, script: Script, update: Update, *, every: bool
    ) -> None:
        on_host = [(module, *one) for module in network.modules() for one in module.named_buffers(recurse=False)]
        on_host = [(module, name, buffer) for module, name, buffer in on_host if buffer.device.type == "cpu"]
        super().__init__(network, run, groups, META, precision_of(run), FusedOps("torch"))
        for module, name, buffer in on_host:  # whose values shapes follow
            module.register_buffer(name, buffer, persistent=False)
        script.module_now = Places(network).now
        self.script, self._update, self._every = script, update, every
        self._completed: list[tuple[int, str]] = []
        self.without_gradient: dict[int, list[str]] = {}  # weights by micro-batch
        self._passes: dict[tuple[int, str], list[Call]] = {}
        for logical, parameter in network.logical_parameters():
            parameter.register_post_accumulate_grad_hook(partial(self._complete, logical.name))

    def _watched(self, network: Network) -> list[tuple[LogicalTensor, nn.Parameter]]:
        return []  # without memory nothing is infinite

    @property
    def real(self) -> list[int]:
        """The micro-batches that run."""
        return list(range(self.num_slots)) if self._every else sorted({0, self.num_slots - 1})

    @property
    def alike(self) -> bool:
        """Whether the last micro-batch has called what the first has."""
        return all(
            [replace(one, micro_batch=None) for one in self._passes[0, direction]]
            == [replace(one, micro_batch=None) for one in self._passes[self.num_slots - 1, direction]]
            for direction in ("forward", "backward")
        )

    def rehearse(self, cached: Sequence[int]) -> None:
        """A whole step. cached: positions in the cache of every layer of the network."""
        size, streams = self.network.config.hidden_size, self.micro_batch_size
        for slot in self.slots:
            lengths = [cached[layer] for layer in self.network.part.layers]
            empty = [torch.empty(streams, one, size, dtype=self.dtype, device=META) for one in lengths]
            slot.restore(empty, max(lengths, default=0))
        ids = np.tile(_spread(self.network.vocab_size, streams, self._block), (self.num_slots, 1))
        with HostIds() if self.network.config.cutoffs else nullcontext():
            with self.script.within(None, "spans"):
                self._update.before()
                spans = self.spans()
            self.train_step(ids, ids, STEP, 0.0, spans)

    @property
    def _block(self) -> int:
        return self.run.training.seq_length

    def _complete(self, name: str, parameter: nn.Parameter) -> None:
        """A gradient is complete."""
        self._completed.append((len(self.script.calls), name))

    def _local_spans(self) -> Tensor | None:
        """As training starts: those of every head are 0."""
        z = self.network.span_parameters()
        return torch.zeros(len(z), z[0].numel(), dtype=self.dtype) if z else None

    def _tensor(self, ids: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(ids, dtype=np.int64))
        return tensor if self.network.config.cutoffs else tensor.to(META)

    @contextmanager
    def _forward_of(self, slot: int) -> Iterator[None]:
        """What a micro-batch calls in its forward pass."""
        self._update_weights(slot)
        with self.script.within(slot, "forward") as calls:
            yield
        self._passes[slot, "forward"] = calls

    def _update_weights(self, slot: int) -> None:
        with self.script.within(slot, ""):
            self._update.weights(slot)

    @contextmanager
    def _backward_of(self, slot: int) -> Iterator[None]:
        """What it calls in its backward pass, which must give every weight a gradient."""
        self._completed, first = [], len(self.script.calls)
        with self.script.within(slot, "backward"):
            yield
            own = self.script.calls[first:]
            self.script.calls[first:] = self._update.completed(
                own, [(mark - first, name) for mark, name in self._completed]
            )
        self._passes[slot, "backward"] = self.script.calls[first:]
        seen = {name for _, name in self._completed}
        names = [logical.name for logical, _ in self.network.logical_parameters()]
        if missing := [name for name in names if name not in seen]:
            self.without_gradient[slot] = missing

    def _repeat(self, slot: int, direction: str) -> None:
        """What the first micro-batch has called, for one that does not run."""
        if direction == "forward":
            self._update_weights(slot)
        self.script.calls += [replace(one, micro_batch=slot) for one in self._passes[0, direction]]

    def _run_micro_batch(self, inputs: Tensor, targets: Tensor, context: BlockContext) -> Tensor:
        slot = next(place for place, one in enumerate(self.slots) if one is context.cache)
        if slot in self.real:
            with self._forward_of(slot):
                loss = self._forward(inputs, targets, context).mean()
            with self._backward_of(slot):
                (loss / self.num_slots).backward()
        else:
            self._repeat(slot, "forward")
            self._repeat(slot, "backward")
        if slot == self.num_slots - 1:
            self._average()
        return torch.zeros(())

    def _average(self) -> None:
        with self.script.within(None, "gradients"):
            self._update.averages()

    def _mean_loss(self, losses: list[Tensor]) -> float:
        with self.script.within(None, "loss"):
            return super()._mean_loss(losses)

    def _optimizer_step(self, lr: float, step: int) -> float:
        with self.script.within(None, "update"):
            self._update.step()
        return 0.0

    def update(self, lr: float, step: int) -> float:
        """The same, of the slots that have run: a cache that no layer has written is an error."""
        norm = self._optimizer_step(lr, step)
        for slot in self.real:
            self.slots[slot].commit(self._block)
        return norm


def _spread(vocab_size: int, streams: int, tokens: int) -> np.ndarray:
    """Ids [streams, tokens] from all over a vocabulary, so that every cluster of an adaptive one has some."""
    count = streams * tokens
    return (np.arange(count, dtype=np.int64) * vocab_size // count).reshape(streams, tokens)
