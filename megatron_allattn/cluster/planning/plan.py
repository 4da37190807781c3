"""All legal layouts of a run over a number of nodes: what each needs, sends and takes, best first.

Recomputation is chosen: of each layout the least that fits the device. What fits not even with all of it is refused,
with the part that is too large and by how much.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from megatron_allattn.cluster.planning.devices import Device
from megatron_allattn.cluster.planning.layouts import Choice, choices
from megatron_allattn.cluster.planning.links import Sent, by_link
from megatron_allattn.cluster.planning.memory import RankMemory, memory_phases
from megatron_allattn.cluster.planning.states import States, states_of
from megatron_allattn.cluster.planning.step_time import StepTime, stage_time, step_time
from megatron_allattn.config import RunConfig, UsageError
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.accounting import passes_traffic, update_traffic
from megatron_allattn.model.network import Network, Part
from megatron_allattn.model.partition import first_reach, stage_parts
from megatron_allattn.model.span import cache_length, window_of_reach
from megatron_allattn.model.traffic import Place
from megatron_allattn.model.work import usual_cluster_tokens
from megatron_allattn.parallel.groups import Group
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.parallel.ledger import Ledger


@dataclass(frozen=True)
class Task:
    """What is to be laid out. look_back: how far every head looks, by layer; explicit: flags that the user gave."""

    run: RunConfig
    vocab_size: int
    nodes: int
    gpus_per_node: int
    device: Device
    look_back: tuple[tuple[int, ...], ...]
    explicit: frozenset[str] = frozenset()

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Candidate:
    """A layout. memory: of the rank that needs most, and `stage` where it is; sent: bytes and messages of the rank that
    sends most in a step, by link class; refused: why it cannot run, then `time` is None."""

    choice: Choice
    run: RunConfig
    data_size: int
    slots: int
    memory: RankMemory | None
    stage: int
    limit: int
    time: StepTime | None = None
    sent: dict[str, Sent] = field(default_factory=dict)
    refused: str | None = None

    @property
    def tokens_per_second(self) -> float:
        assert self.time is not None
        training = self.run.training
        return training.global_batch_size * training.seq_length / self.time.total

    @property
    def seconds_to_end(self) -> float:
        """Of the recipe's steps."""
        assert self.time is not None
        return self.run.training.train_iters * self.time.total


class Planner:
    """Looks at layouts of one task; networks without memory are made once for each stage."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.device = task.device.of_node(task.gpus_per_node)
        self._networks: dict[tuple[int, Part], Network] = {}
        self._parts: dict[int, list[Part]] = {}
        self._states: dict[tuple, States] = {}
        self._updates: dict[tuple, Ledger] = {}

    def at(self, look_back: tuple[tuple[int, ...], ...]) -> "Planner":
        """The same, when heads look so far."""
        other = Planner(replace(self.task, look_back=look_back))
        other._networks, other._parts = self._networks, self._parts
        other._states, other._updates = self._states, self._updates
        return other

    def candidates(self) -> list[Candidate]:
        """All, those that run first and the fastest of them before others, then those that were refused, the nearest
        to the device's memory before others."""
        task = self.task
        groups: dict[Choice, list[tuple[Choice, RunConfig]]] = {}
        for choice, run in choices(task.run, task.nodes, task.gpus_per_node, task.explicit).items():
            groups.setdefault(replace(choice, recompute_granularity="none"), []).append((choice, run))
        found = [self.best_of(group) for group in groups.values()]
        return sorted(found, key=lambda one: (one.time is None, one.time.total if one.time else _over(one)))

    def best_of(self, group: Sequence[tuple[Choice, RunConfig]]) -> Candidate:
        """The first that fits, in the order none, selective, full; else the last."""
        last = None
        for choice, run in group:
            last = self.look(choice, run)
            if last.refused is None:
                return self.timed(last)
        assert last is not None
        return last

    def look(self, choice: Choice, run: RunConfig) -> Candidate:
        """Its memory, and whether that fits."""
        places = self.places(run)
        shape = places[0]
        limit = self.device.memory_bytes
        common = (choice, run, shape.layout.data_size, shape.slots)
        try:
            peaks = [max(self.phases(place), key=lambda phase: phase.total) for place in places]
        except UsageError as error:
            return Candidate(*common, None, 0, limit, refused=str(error))
        stage = max(range(len(peaks)), key=lambda one: peaks[one].total)
        memory = peaks[stage]
        refused = too_large(memory, limit, self.device.name) if memory.total > limit else None
        return Candidate(*common, memory, stage, limit, refused=refused)

    def timed(self, candidate: Candidate) -> Candidate:
        """With its traffic and time, or refused where they are not known."""
        task, run = self.task, candidate.run
        stages, most = [], dict[str, Sent]()
        try:
            for place in self.places(run):
                ledger = passes_traffic(place, self.cache_lengths(run), self.tail_targets(place))
                ledger.include(self.update(place))
                states = self.states(place)
                state = states.weights + states.gradients + states.optimizer
                stages.append(stage_time(place, task.look_back, task.device, ledger, task.gpus_per_node, state))
                links = by_link(ledger, place.layout, place.rank, task.gpus_per_node)
                if not most or sum(one.num_bytes for one in links.values()) > sum(
                    one.num_bytes for one in most.values()
                ):
                    most = links
            return replace(candidate, time=step_time(stages, candidate.slots), sent=most)
        except UsageError as error:
            return replace(candidate, refused=str(error))

    def phases(self, place: Place) -> list[RankMemory]:
        """Of a step of this rank."""
        return memory_phases(place, self.task.look_back, self.device, states=self.states(place))

    def states(self, place: Place) -> States:
        """They depend on neither micro-batches nor spans."""
        key = self._key(place)
        if key not in self._states:
            self._states[key] = states_of(place)
        return self._states[key]

    def update(self, place: Place) -> Ledger:
        """Nor does what an update sends, but for the number of micro-batches after which ZeRO 2 and 3 reduce."""
        key = (*self._key(place), place.slots if place.run.parallel.zero_stage > 1 else 1)
        if key not in self._updates:
            self._updates[key] = update_traffic(place)
        return self._updates[key]

    @staticmethod
    def _key(place: Place) -> tuple:
        again = place.run.training.recompute_granularity == "full" and place.run.parallel.zero_stage == 3
        return place.layout, place.rank, place.part, place.run.parallel.zero_stage, again

    def places(self, run: RunConfig) -> list[Place]:
        """The rank of every stage whose heads look farthest."""
        task, parallel = self.task, run.parallel
        tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        layout = Layout.from_world(task.world_size, tensor, pipeline)
        places = []
        for stage, part in enumerate(self.parts(run)):
            rank = layout.rank(tensor=self._longest_shard(part, tensor), pipeline=stage)
            known = self.network(run, part)
            places.append(Place(run, task.vocab_size, layout, rank, part, known))
        return places

    def parts(self, run: RunConfig) -> list[Part]:
        """What every stage holds."""
        stages = run.parallel.pipeline_model_parallel_size
        if stages not in self._parts:
            model, block = run.model, run.training.seq_length
            self._parts[stages] = stage_parts(run.parallel, model, self.task.vocab_size, first_reach(model), block)
        return self._parts[stages]

    def network(self, run: RunConfig, part: Part) -> Network:
        """A stage's parameters, which are those of all of its ranks in size."""
        ranks = run.parallel.tensor_model_parallel_size
        key = ranks, part
        if key not in self._networks:
            with torch.device("meta"):
                group = Group(tuple(range(ranks)), 0, None)
                self._networks[key] = Network(run.model, self.task.vocab_size, group, FusedOps("torch"), part=part)
        return self._networks[key]

    def cache_lengths(self, run: RunConfig) -> list[int]:
        longest = run.model.max_attention_span
        return [cache_length(window_of_reach(max(layer), longest), longest) for layer in self.task.look_back]

    def tail_targets(self, place: Place) -> int:
        """Of a replica's targets in a step, those in a cluster after the first."""
        model = place.run.model
        if not model.cutoffs:
            return 0
        return sum(usual_cluster_tokens(model, place.vocab_size, place.slots * place.tokens)[1:])

    def _longest_shard(self, part: Part, tensor: int) -> int:
        rows = [self.task.look_back[layer] for layer in part.layers]
        count = len(rows[0]) // tensor
        return max(range(tensor), key=lambda rank: sum(sum(row[rank * count : (rank + 1) * count]) for row in rows))


def too_large(memory: RankMemory, limit: int, device: str) -> str:
    """In one line, by how much and what of it."""
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])
    largest = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts[:3])
    over = (memory.total - limit) / 1e9
    return f"needs {over:.1f} GB more than the {limit / 1e9:.0f} GB of {device}: {largest} GB in {memory.phase}"


def _over(candidate: Candidate) -> float:
    return float("inf") if candidate.memory is None else candidate.memory.total


def distinct(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """The best of those with the same TP, PP and ZeRO stage, in order."""
    seen = set()
    for one in candidates:
        key = one.choice.tensor_model_parallel_size, one.choice.pipeline_model_parallel_size, one.choice.zero_stage
        if key not in seen:
            seen.add(key)
            yield one
