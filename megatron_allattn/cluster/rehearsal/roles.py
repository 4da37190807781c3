"""Who is rehearsed: one rank for every role, a place in the tensor group on a stage of the pipeline.

The replicas of a role are one to what is built and called: a network is made from the run's flags, the size of the
tensor group, a place in it and the stage's layers (`stage_network`), and never learns of a replica; the step around it
takes of its replica the streams alone, which are values of dropout's keys. So a role runs once, and every replica has
its calls, in groups of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_allattn.cluster.rehearsal.mismatch import Mismatch, describe
from megatron_allattn.cluster.rehearsal.pipeline import RehearsedStage
from megatron_allattn.cluster.rehearsal.rank import RehearsedRank
from megatron_allattn.cluster.rehearsal.update import Update
from megatron_allattn.config import RunConfig, UsageError
from megatron_allattn.kernels import eager, outline
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.network import Network, Part
from megatron_allattn.model.partition import stage_network
from megatron_allattn.model.traffic import Place
from megatron_allattn.model.traffic_update import zero_settings
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.parallel.silent import Call, Script, silent_groups


@dataclass(frozen=True)
class Role:
    """What one rank of a role has built and called.

    ran: how many of its `slots` micro-batches have run; without_gradient: by micro-batch, the weights that its backward
    pass gives none.
    """

    rank: int
    network: Network
    calls: tuple[Call, ...]
    slots: int
    ran: int
    without_gradient: dict[int, list[str]]


def rehearse_role(
    run: RunConfig, vocab_size: int, layout: Layout, rank: int, parts: Sequence[Part], cached: Sequence[int]
) -> Role:
    """Build and run a step of `rank`. parts: what every stage holds; cached: positions in the cache of every layer.

    Of the micro-batches the first and the last run; the others are taken to call what these do, unless the two differ:
    then all of them run.

    Raises Mismatch where its code fails, with the place; UsageError for a DeepSpeed JSON whose traffic is not known.
    """
    for every in (False, True):
        script = Script()
        try:
            ran = _build(run, vocab_size, layout, rank, parts[layout.pipeline_rank(rank)], script, every)
            ran.rehearse(cached)
        except UsageError:
            raise
        except (RuntimeError, ValueError, AssertionError) as error:
            place = f" ({script.place})" if script.place else ""
            rule = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise Mismatch(f"{describe(layout, rank)} fails{place}: {rule}") from error
        if every or ran.alike:
            break
    return Role(rank, ran.network, tuple(script.calls), ran.num_slots, len(ran.real), ran.without_gradient)


def _build(
    run: RunConfig, vocab_size: int, layout: Layout, rank: int, part: Part, script: Script, every: bool
) -> RehearsedRank:
    groups = silent_groups(layout, rank, script)
    attend = eager.attend if run.training.attention_backend == "eager" else outline.attend
    with torch.device("meta"):
        network = stage_network(run, vocab_size, groups.tensor, part, FusedOps("torch"), attend)
    place = Place(run, vocab_size, layout, rank, part)
    kind = RehearsedStage if layout.pipeline_size > 1 else RehearsedRank
    return kind(network, run, groups, script, Update(place, zero_settings(place), script), every=every)
