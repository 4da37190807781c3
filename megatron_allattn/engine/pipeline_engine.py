"""DeepSpeed's pipeline (1F1B), with ZeRO 0 or 1 over the replicas of every stage.

Who does what, beside what deepspeed_engine.py says:

- DeepSpeed runs the schedule and sends activations and their gradients between neighbouring stages. To it every stage
  is one layer, which is this rank's `Network` with a part of the layers.
- Which slot a micro-batch belongs to travels with its activations: with it a stage finds the caches, dropout keys and
  spans that it needs.
- A tensor that several stages hold (the position table, a table shared by embedding and output) has its gradient
  summed over them by DeepSpeed before the update, and is counted once in norms. Each stage then averages it over its
  own replicas, among tensors of its own: with three replicas or more in another order than other stages, so that it is
  rounded another way. Therefore its first holder's value counts, which the others get after every update.

Its `train_batch` is not used, since it would update at once: the same instructions run here without the last one.
"""

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron_allattn.engine.caches import CacheSlot
from megatron_allattn.engine.deepspeed_engine import DeepSpeedEngine
from megatron_allattn.engine.interface import Spans
from megatron_allattn.model.attention import BlockContext, Observe
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.collectives import all_reduce, broadcast_from_first
from megatron_allattn.parallel.groups import Group, Groups


class Stage(nn.Module):
    """(what comes in, slot) → (hidden states, slot); tokens come in at the first stage. contexts: of every slot."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        self.contexts: list[BlockContext] = []
        self.nats = torch.zeros(())  # of the micro-batch before, on the last stage

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        received, slot = inputs
        context = self.contexts[int(slot)]
        hidden = self.network.embed(received, context) if self.network.part.first else received
        return self.network.run_layers(hidden, context), slot

    def loss(self, outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        """The mean over a micro-batch; keeps its nats per token [B, M]."""
        hidden, slot = outputs
        nats = self.network.read_out(hidden, self.contexts[int(slot)], targets)
        self.nats = nats.detach()
        return nats.mean()


def tied_parameters(network: Network, groups: Groups) -> list[tuple[nn.Parameter, Group]]:
    """A stage's tensors that other stages hold too, and the stages that do."""
    tied = [(parameter, groups.pipeline) for parameter in network.position.parameters()]
    shared = not network.config.untie_embeddings_and_output_weights
    if shared and network.embedding is not None:
        tied += [(parameter, groups.ends) for parameter in network.embedding.parameters()]
    return tied


def from_last(number: float, pipeline: Group, device: torch.device) -> Tensor:
    """The last stage's number, float64 scalar, on all stages; the others give 0."""
    return all_reduce(torch.tensor(number, dtype=torch.float64, device=device), pipeline)


def schedule_without_step(num_slots: int, pipeline: Group) -> Any:
    """DeepSpeed's instructions for this stage in a step, 1F1B, up to the reduction of gradients."""
    from deepspeed.runtime.pipe.schedule import OptimizerStep, TrainSchedule  # noqa: PLC0415  (see import_deepspeed)

    class Schedule(TrainSchedule):
        def steps(self) -> Iterator[list[Any]]:
            for instructions in super().steps():
                yield [one for one in instructions if not isinstance(one, OptimizerStep)]

    return Schedule(num_slots, pipeline.size, pipeline.rank)


class PipelineEngine(DeepSpeedEngine):
    """See `Engine`; `network` is this stage's part."""

    def _initialize(self, settings: dict[str, Any]) -> Any:
        self._stage, self._tied = Stage(self.network), tied_parameters(self.network, self.groups)
        self._schedule = schedule_without_step(self.num_slots, self.groups.pipeline)
        self._deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)  # takes the groups that exist
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its layers, whatever the logger's level
            module = self._module()
            engine, *_ = self._deepspeed.initialize(model=module, optimizer=self.optimizer, config=settings)
        return engine

    def _settings(self, half: bool) -> tuple[int, dict[str, Any]]:
        """And whether DeepSpeed may send a part of the activations from every shard, which they must all have whole."""
        stage, settings = super()._settings(half)
        whole = not self.run.parallel.sequence_parallel
        return stage, settings | {"pipeline": {"pipe_partitioned": whole, "grad_partitioned": whole}}

    def _module(self) -> Any:
        from deepspeed.runtime.pipe.module import PipelineModule  # noqa: PLC0415  (see import_deepspeed)
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology  # noqa: PLC0415

        layout, stage, tied = self.groups.layout, self.groups.pipeline.rank, self._tied

        class Module(PipelineModule):
            def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
                return [(parameter, group.handle) for parameter, group in tied]

        module = Module(
            [self._stage if place == stage else None for place in range(layout.pipeline_size)],
            topology=PipeModelDataParallelTopology(layout.pipeline_size, layout.tensor_size, layout.data_size),
            loss_fn=self._stage.loss,
            partition_method="uniform",
        )
        for parameter, group in tied:
            parameter.ds_pipe_replicated = group.rank > 0  # type: ignore[attr-defined]
        return module

    def forward_backward(self, inputs: np.ndarray, targets: np.ndarray, step: int, spans: Spans) -> float:
        slots = list(self._micro_batches(step, spans))
        self._stage.contexts = [context for _, context in slots]
        losses = self._run(self._schedule, [(inputs[rows], targets[rows]) for rows, _ in slots])
        return self._on_all_stages(self._mean_loss(losses) if losses else 0.0).item()

    @torch.no_grad()
    def evaluate_block(
        self, inputs: np.ndarray, targets: np.ndarray, spans: Spans, slot: CacheSlot, observe: Observe | None = None
    ) -> Tensor:
        from deepspeed.runtime.pipe.schedule import InferenceSchedule  # noqa: PLC0415

        pipeline = self.groups.pipeline
        self._stage.contexts = [
            BlockContext(spans.windows, slot, dropout_keys=None, look_back=spans.look_back, observe=observe)
        ]
        self._run(InferenceSchedule(1, pipeline.size, pipeline.rank), [(inputs, targets)])
        slot.commit(inputs.shape[1])
        return self._on_all_stages(self._stage.nats.double().sum().item() if self.network.part.last else 0.0)

    def _on_all_stages(self, number: float) -> Tensor:
        return from_last(number, self.groups.pipeline, self.device)

    def _run(self, schedule: Any, batches: list[tuple[np.ndarray, np.ndarray]]) -> list[Tensor]:
        """Run micro-batches through a schedule; their losses, on the last stage."""
        data: Iterator[Any] = (
            ((self._tensor(tokens), torch.tensor([slot], device=self.device)), self._tensor(targets))
            for slot, (tokens, targets) in enumerate(batches)
        )
        self.engine.set_dataiterator(data)
        self.engine.total_loss, self.engine._compute_loss = None, True
        self.engine._exec_schedule(schedule)
        return self.engine.fwd_outputs if self.network.part.last else []

    def _take_step(self) -> None:
        self.engine._exec_optimizer_step()
        for parameter, group in self._tied:
            broadcast_from_first(parameter.data, group)
