"""One small interface over the engines that train a network.

An engine owns the optimizer and the caches. It is given this rank's streams of a step as one block [S, M] (S = slots ×
micro-batch size), cuts it into micro-batch slots, runs them, and makes one update. `PlainEngine` is PyTorch alone (any
precision; one process or a TP × DP grid); `DeepSpeedEngine` brings ZeRO. What it keeps is in state.py.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from megatron_allattn.config import RunConfig
from megatron_allattn.engine.caches import CacheSlot
from megatron_allattn.engine.finite import GradientWatch, tell_not_finite, tell_overflow
from megatron_allattn.engine.loss_scale import LossScale
from megatron_allattn.engine.optimizers import clip_gradients, gradient_norm
from megatron_allattn.engine.state import EngineState
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.accounting import count_parameters
from megatron_allattn.model.attention import BlockContext, Observe
from megatron_allattn.model.network import Network
from megatron_allattn.model.span import layer_windows, layers_look_back, span_in_tokens
from megatron_allattn.parallel.collectives import (
    all_gather,
    all_reduce,
)
from megatron_allattn.parallel.groups import Groups
from megatron_allattn.parallel.layout import streams_of
from megatron_allattn.parallel.logical import LogicalTensor
from megatron_allattn.parallel.random import DropoutKeys


@dataclass(frozen=True)
class StepResult:
    """What one update reports. loss: nats per token, averaged over the global batch; grad_norm: before clipping;
    loss_scale: of this step, 1 but in float16; overflow: the gradient was too large for it, and nothing was updated;
    not_finite: what was not finite and where, of a step of which nothing is kept."""

    loss: float
    grad_norm: float
    loss_scale: float = 1.0
    overflow: bool = False
    not_finite: str | None = None


@dataclass(frozen=True)
class Spans:
    """How far heads look back, and what follows from it.

    windows: W of every layer; look_back: how far each head of this rank looks, by layer; z: [layers, heads] on the CPU,
    None with a fixed span; tokens: float64 [layers, heads], how many tokens each head looks back, ramp included. Heads
    are those that attend to the context (head-split: half), in logical order but for `look_back`, which is in a rank's.
    """

    windows: tuple[int, ...]
    look_back: tuple[tuple[int, ...], ...]
    z: Tensor | None
    tokens: Tensor


def local_spans(network: Network) -> Tensor | None:
    """z of this rank's heads, [layers, H_local]; None with a fixed span."""
    z = network.span_parameters()
    return torch.stack([one.detach().flatten() for one in z]) if z else None


def find_spans(network: Network, local: Tensor | None) -> Spans:
    """The spans of all heads of all layers: one gather over the tensor group and one read by the host.

    local: what `local_spans` gives, for an engine whose parameters are not whole where they stand.
    """
    model = network.config
    if local is None:
        full = torch.full((model.num_layers, model.num_context_heads), model.max_attention_span, dtype=torch.float64)
        windows = (model.max_attention_span,) * model.num_layers
        heads = model.num_context_heads // network.group.size
        return Spans(windows, tuple((window,) * heads for window in windows), None, full)
    length, ramp = model.max_attention_span, model.span_ramp
    placed = torch.cat(all_gather(local.detach(), network.group), dim=1).cpu()
    windows = layer_windows(placed.tolist(), length, ramp)
    own = placed.chunk(network.group.size, dim=1)[network.group.rank].tolist()
    z = torch.empty_like(placed).scatter_(1, network.head_order, placed)
    reach = layers_look_back(own, windows, length, ramp)
    return Spans(windows, reach, z, span_in_tokens(z, length, ramp))


def precision_of(run: RunConfig) -> torch.dtype:
    """What a run computes in."""
    return torch.bfloat16 if run.training.bf16 else torch.float16 if run.training.fp16 else torch.float32


class Engine(EngineState):
    """A network, its optimizer and its caches on this rank. Every method is collective over all ranks."""

    zero_stage = 0  # the ZeRO stage that runs
    loss_scale: LossScale | None = None  # in float16 with DeepSpeed
    overflow = False  # whether the last update was left out since float16 is too small for its gradient
    not_finite: str | None = None  # what was not finite in the last step, of which then nothing is kept
    skipped = 0  # updates left out so far, for whichever reason

    def __init__(
        self,
        network: Network,
        run: RunConfig,
        groups: Groups,
        device: torch.device,
        dtype: torch.dtype,
        fused: FusedOps,
    ) -> None:
        super().__init__(network, run, groups, device, dtype)
        self.fused = fused
        self.local_parameters = count_parameters(network).local  # as the layers use them, before ZeRO 3 parts them
        self.own_loss = torch.zeros((), dtype=torch.float64)  # the last step's, of this rank's micro-batches
        self.mean_loss = self.own_loss  # over the replicas
        self._watch = GradientWatch(self._watched(network))

    def _watched(self, network: Network) -> list[tuple[LogicalTensor, nn.Parameter]]:
        """The parameters whose gradients may turn out not to be finite."""
        return network.logical_parameters()

    def spans(self) -> Spans:
        """Today's spans; see `find_spans`. In a pipeline every stage learns those of all."""
        local = self._local_spans()
        if local is not None and self.groups.pipeline.size > 1:
            every = local.new_zeros(self.network.config.num_layers, local.shape[1])
            layers = self.network.part.layers
            every[layers.start : layers.stop] = local
            local = all_reduce(every, self.groups.pipeline)
        return find_spans(self.network, local)

    def _local_spans(self) -> Tensor | None:
        """z of the local heads of this part's layers, [layers, H_local]; None with a fixed span."""
        return local_spans(self.network)

    def forward_backward(self, inputs: np.ndarray, targets: np.ndarray, step: int, spans: Spans) -> float:
        """Accumulate the gradients of the step's micro-batches; inputs, targets: [S, M] of this rank's streams.

        Returns the loss averaged over the global batch. The caches' next state is written, not committed.
        """
        losses = [
            self._run_micro_batch(self._tensor(inputs[rows]), self._tensor(targets[rows]), context)
            for rows, context in self._micro_batches(step, spans)
        ]
        return self._mean_loss(losses)

    def _micro_batches(self, step: int, spans: Spans) -> Iterator[tuple[slice, BlockContext]]:
        """Of every slot, which of this rank's streams are in it and what its layers need to know."""
        for index, slot in enumerate(self.slots):
            rows = slice(index * self.micro_batch_size, (index + 1) * self.micro_batch_size)
            context = BlockContext(
                windows=spans.windows,
                cache=slot,
                dropout_keys=self._dropout_keys(index, step),
                loss_scale=self._loss_scale() / self.num_slots,
                look_back=spans.look_back,
                reread_caches=self.run.parallel.shard_caches,
            )
            yield rows, context

    def _mean_loss(self, losses: list[Tensor]) -> float:
        """Of the slots' losses over the global batch."""
        self.own_loss = torch.stack(losses).double().mean()
        self.mean_loss = all_reduce(self.own_loss.clone(), self.groups.data) / self.groups.data.size
        return self.mean_loss.item()

    def update(self, lr: float, step: int) -> float:
        """Update number `step` (from 1) and the caches' commit. Returns the gradient norm before clipping.

        Neither is made where the loss or the gradient is not finite on any rank, and `not_finite` says so.
        """
        norm = self._optimizer_step(lr, step)
        for slot in self.slots:
            if self.not_finite is None:
                slot.commit(self.run.training.seq_length)
            else:
                slot.discard()
        self._watch.clear()
        return norm

    def _judge(self, left_out: bool, smallest: bool) -> None:
        """Count an update that was left out, and say why. smallest: the loss scale could not be lowered any more."""
        self.overflow, self.not_finite = False, None
        self.skipped += left_out
        if left_out and self.loss_scale is None:
            self.not_finite = tell_not_finite(self.groups, self._watch.not_finite(), self.own_loss)
        elif left_out:
            self.not_finite = tell_overflow(self.groups, self.own_loss, smallest=smallest)
            self.overflow = self.not_finite is None

    def _whole_norm(self) -> float:
        """The norm of gradients that every replica has whole, not finite where a loss is not, before Adam's clip, which
        this does. Where it is not finite there are no gradients any more, and an optimizer finds nothing to do."""
        norm = gradient_norm(self.network, self.groups.tensor, self.fused, self.groups.pipeline, self.mean_loss)
        if not math.isfinite(norm):
            self.network.zero_grad(set_to_none=True)
        elif self.run.optimizer.optimizer == "adam" and self.run.optimizer.clip_grad:
            clip_gradients(self.network, norm, self.run.optimizer.clip_grad)
        return norm

    def train_step(self, inputs: np.ndarray, targets: np.ndarray, step: int, lr: float, spans: Spans) -> StepResult:
        """`forward_backward` and `update`."""
        scale, loss = self._loss_scale(), self.forward_backward(inputs, targets, step, spans)
        norm = self.update(lr, step)
        return StepResult(loss, norm, scale, self.overflow, self.not_finite)

    def clear_caches(self) -> None:
        """The streams restart: forget what came before."""
        for slot in self.slots:
            slot.clear()

    def new_evaluation_slot(self, batch_size: int) -> CacheSlot:
        """Empty caches for an evaluation that must not touch the training streams."""
        return self._new_slot(batch_size)

    @torch.no_grad()
    def evaluate_block(
        self, inputs: np.ndarray, targets: np.ndarray, spans: Spans, slot: CacheSlot, observe: Observe | None = None
    ) -> Tensor:
        """Sum of nats over a block [B, M] of this rank's evaluation streams, float64 scalar; commits `slot`.

        observe: is shown what the attention of this rank's layers is given.
        """
        context = BlockContext(spans.windows, slot, dropout_keys=None, look_back=spans.look_back, observe=observe)
        total = self._forward(self._tensor(inputs), self._tensor(targets), context).double().sum()
        slot.commit(inputs.shape[1])
        return total

    def _tensor(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(ids, dtype=np.int64)).to(self.device, non_blocking=True)

    def _dropout_keys(self, slot: int, step: int) -> DropoutKeys:
        streams = streams_of(
            self.groups.data.rank,
            slot,
            data_size=self.groups.data.size,
            micro_batch_size=self.micro_batch_size,
            num_slots=self.num_slots,
        )
        ids = torch.tensor(streams, dtype=torch.int32, device=self.device)
        return DropoutKeys(self.run.training.seed, step, ids)

    @abstractmethod
    def _loss_scale(self) -> float:
        """The factor, beside 1 / slots, by which the main loss is scaled before backward."""

    @abstractmethod
    def _forward(self, inputs: Tensor, targets: Tensor, context: BlockContext) -> Tensor:
        """Nats per target [B, M]."""

    @abstractmethod
    def _run_micro_batch(self, inputs: Tensor, targets: Tensor, context: BlockContext) -> Tensor:
        """Forward and backward of one micro-batch; its mean loss, detached."""

    @abstractmethod
    def _optimizer_step(self, lr: float, step: int) -> float:
        """Clip, update, clear gradients; the norm before clipping."""
