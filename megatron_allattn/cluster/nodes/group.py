"""The preflight of all ranks of a job together, started by any launcher as the training will be: one process a rank.

Ranks meet (parallel/meeting.py names who is missing), the first of each node looks at it as `local.examine` does, and
then they measure each other: clocks, a shared folder, what they compute, all-reduces of the layout's groups, messages
between nodes. The first rank makes the table. Control goes over gloo and host memory, so that a broken GPU can be told
of; what a training would do on GPUs is done on GPUs (NCCL), once every rank has one.

Nothing waits without a limit: a rank that does not answer within --timeout-seconds is named (parallel/failures.py).
"""

import os
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megatron_allattn.cluster.nodes import rates
from megatron_allattn.cluster.nodes.checks import ALL, Check, table
from megatron_allattn.cluster.nodes.compare import Judgement, decide, judge
from megatron_allattn.cluster.nodes.judging import clock_checks, counted, group_checks, link_checks, rate_checks
from megatron_allattn.cluster.nodes.local import Asked, NodeReport, examine, renamed
from megatron_allattn.cluster.nodes.places import Places, own_place
from megatron_allattn.cluster.nodes.shared import shared_checks
from megatron_allattn.config import ParallelConfig, UsageError
from megatron_allattn.config.disk import SEEN_SECONDS
from megatron_allattn.config.rules import check_replicas
from megatron_allattn.parallel import discovery, probes
from megatron_allattn.parallel.addresses import RankInfo
from megatron_allattn.parallel.collectives import broadcast_object, gather_objects
from megatron_allattn.parallel.failures import Ending, Watch
from megatron_allattn.parallel.groups import Groups, make_groups
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.training.main import as_rank


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """What is asked of all together. asked: of each node; seconds: the limit of every wait; slow_below: part of the
    median; clock_skew: seconds; megabytes: of a message (None: `rates.MEGABYTES`); shared: a folder of all nodes."""

    asked: Asked
    parallel: ParallelConfig
    seconds: float
    slow_below: float
    clock_skew: float
    shared: Path | None = None
    megabytes: int | None = None
    json: Path | None = None


def run_group(options: GroupOptions) -> int:
    """The preflight as one rank of however many the launcher has started; the exit code."""
    preflight = _Preflight(options)
    return as_rank(
        lambda world_size: check_replicas(options.parallel, world_size), options.parallel, preflight.run, preflight.meet
    )


@dataclass
class _Preflight:
    """What is known so far, on this rank; the checks on all ranks alike."""

    options: GroupOptions
    checks: list[Check] = field(default_factory=list)
    reports: list[NodeReport] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    places: Places = field(default_factory=lambda: Places(()))

    def meet(self, info: RankInfo, parallel: ParallelConfig) -> tuple[Groups, torch.device]:
        """Meet over gloo, whatever devices there are. Raises what `discovery.initialize` does."""
        self.info = info
        begin = time.monotonic()
        discovery.initialize(info, self.options.seconds, torch.device("cpu"))
        self.took = time.monotonic() - begin
        tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        layout = Layout.from_world(info.world_size, tensor, pipeline)
        return make_groups(layout, timedelta(seconds=self.options.seconds)), torch.device("cpu")

    def run(self, groups: Groups, _: torch.device, watch: Watch) -> int:
        watch.last_words = lambda ending: self._cut_short(groups, ending)
        try:
            self._look(groups, watch)
        except Exception as error:
            self._cut_short(groups, error)
            raise
        code = 0
        if groups.rank == 0:
            judgement = self._judgement()
            print(table(judgement.checks, len(judgement.nodes)))
            if self.options.json is not None:
                judgement.write(self.options.json, self.numbers)
            code = 0 if judgement.go else 1
        return int(broadcast_object(code, groups.world))

    def _cut_short(self, groups: Groups, _: Ending | Exception) -> None:
        """The table of what was found before something ended it: what is told then is not all."""
        if groups.rank == 0 and self.reports:
            lines = table(self._judgement().checks, len(self.places.nodes)).splitlines()
            print("\n".join([*lines[:-1], "no-go: it did not come to its end"]), flush=True)

    def _judgement(self) -> Judgement:
        of_nodes = judge(self.reports, self.places.nodes)
        return decide(of_nodes.nodes, [*self.checks[:1], *of_nodes.checks, *self.checks[1:]])

    def _look(self, groups: Groups, watch: Watch) -> None:
        options, world = self.options, groups.world
        minutes = options.seconds / 60
        with watch.section("while nodes look at themselves", minutes):
            self._nodes(groups)
        with watch.section("while clocks are compared", minutes):
            self._clocks(groups)
        if options.shared is not None:
            with watch.section("while ranks look at the shared folder", minutes):
                limit = min(SEEN_SECONDS, options.seconds / 2)
                self.checks += shared_checks(options.shared, self.places, world, limit)
        with watch.section("while devices are chosen", minutes):
            device = self._device(groups)
        if device is None:
            return
        measured = groups
        if device.type == "cuda":
            measured = make_groups(groups.layout, timedelta(seconds=options.seconds), backend="nccl")
        with watch.section("while ranks compute", minutes):
            computed = rates.compute_rates(measured, world, device)
        self.numbers["compute_gflops"] = computed
        self.checks += rate_checks("compute rate", computed, self.places, options.slow_below, "GFLOP/s")
        with watch.section("while groups reduce", minutes):
            reduced = rates.group_rates(measured, world, device, options.megabytes)
        for one in reduced:
            self.checks += group_checks(one, self.places, options.slow_below)
        self.numbers["all_reduce"] = [vars(group) for one in reduced for group in one]
        with watch.section("while nodes exchange messages", minutes):
            found = rates.links(measured, world, self.places, device, options.megabytes)
        self.checks += link_checks(found, self.places, options.slow_below)
        self.numbers["links"] = [vars(link) for link in found]

    def _nodes(self, groups: Groups) -> None:
        """Who is where, and what the first rank of each node finds on it."""
        world = groups.world
        self.places = Places.of(gather_objects(own_place(self.info.local_rank), world))
        first = groups.rank in self.places.first_ranks
        report = renamed(examine(self.options.asked), self.places.of_rank[groups.rank]) if first else None
        self.reports = [one for one in gather_objects(report, world) if one is not None]
        where = f"{self.info.master_addr}:{self.info.master_port}"
        nodes = counted(len(self.places.nodes), "node")
        found = f"{where}: all {world.size} ranks on {nodes}, {self.took:.1f} s" if world.size > 1 else "one process"
        self.checks.append(Check(name="meeting", node=ALL, status="ok", found=found, asked="every rank, at this port"))

    def _clocks(self, groups: Groups) -> None:
        others = self.places.first_ranks[1:]
        own = probes.clock_offset(others, groups.world)
        told = gather_objects(None if own is None else (own.seconds, own.uncertainty), groups.world)
        offsets = {rank: told[rank] for rank in others}
        self.checks += clock_checks(offsets, self.places, self.options.clock_skew)
        self.numbers["clock_seconds"] = {self.places.of_rank[rank]: offset for rank, offset in offsets.items()}

    def _device(self, groups: Groups) -> torch.device | None:
        """This rank's device, of one kind on all ranks; None where nothing is to be measured."""
        trouble, device = "", torch.device("cpu")
        try:
            if os.environ.get("DS_ACCELERATOR") != "cpu":
                device = discovery.select_device(self.info)
            if device.type == "cuda":
                torch.cuda.set_device(device)
                torch.zeros(1, device=device)
        except (UsageError, RuntimeError) as error:
            trouble = str(error).partition("\n")[0]
        told = gather_objects((device.type, trouble), groups.world)
        kinds = {kind for kind, _ in told}
        for rank, (kind, what) in enumerate(told):
            if not what and len(kinds) > 1 and kind == "cpu":
                what = "no GPU, but other ranks have one"
            if what:
                way = "see the row of devices for the node, and what its ranks are given (CUDA_VISIBLE_DEVICES)"
                self.checks.append(
                    Check(
                        name="devices of ranks",
                        node=self.places.of_rank[rank],
                        status="fault",
                        found=f"rank {rank}: {what}",
                        asked="one for each rank, of one kind",
                        way_out=way,
                    )
                )
        if len(kinds) > 1 or any(what for _, what in told):
            found = "not measured: not every rank has a device"
            self.checks.append(Check(name="rates", node=ALL, status="unchecked", found=found))
            return None
        return device
