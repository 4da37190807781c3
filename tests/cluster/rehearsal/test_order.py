"""What the rehearsal of a rank says that it sends, against what processes really send: every message, in order."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from megatron_allattn.cluster.rehearsal import rank as rehearsal
from megatron_allattn.cluster.rehearsal.roles import rehearse_role
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.parallel.ledger import Ledger, groups_by_name
from megatron_allattn.parallel.silent import Call
from tests.model.test_traffic import ALL
from tests.support.layouts import rest
from tests.support.pool import WorkerPools
from tests.support.trained import ADAPTIVE_TIED, TIED, VOCABULARY, Trained, deepspeed, recorded_step

Sent = tuple[tuple[int, ...], str, int]
"""The ranks of the group, or the peer; operation; bytes."""


class InOrder(Ledger):
    """Every message by itself."""

    def __init__(self, layout: Layout, rank: int) -> None:
        super().__init__(layout, rank)
        self.messages: list[Sent] = []

    def add_among(self, ranks: Sequence[int], operation: str, num_bytes: int, count: int = 1) -> None:
        if len(ranks) > 1:
            self.messages += [(tuple(ranks), operation, num_bytes // count)] * count

    def add_between(self, peer: int, operation: str, num_bytes: int) -> None:
        self.messages.append(((peer,), operation, num_bytes))


@dataclass(frozen=True)
class Real:
    """The messages of one step on a rank, and what they depend on beside the configuration."""

    messages: list[Sent]
    cached: list[int]
    targets: np.ndarray


def record(rank: int, world_size: int, case: Trained) -> Real:
    found = recorded_step(rank, case, InOrder)
    return Real(found.ledger.messages, found.cache_lengths, found.targets)


def sent(layout: Layout, rank: int, calls: Sequence[Call]) -> list[Sent]:
    groups = groups_by_name(layout, rank)
    peers = {towards: rank + towards * layout.tensor_size * layout.data_size for towards in (1, -1)}
    return [
        ((peers[one.towards],) if one.towards else groups[one.group], one.operation.split(" ")[0], one.num_bytes)
        for one in calls
    ]


def by_operation(messages: Sequence[Sent]) -> dict[tuple[tuple[int, ...], str], list[int]]:
    found = defaultdict(list)
    for ranks, operation, num_bytes in messages:
        found[ranks, operation].append(num_bytes)
    return {key: sorted(sizes) for key, sizes in found.items()}


def check(pools: WorkerPools, case: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(tensor_size=case.layout.tensor, data_size=case.layout.data, pipeline_size=case.layout.pipeline)
    for rank, real in enumerate(pools(layout.world_size).run(record, case, timeout=120)):
        # what data decides: how many targets are in the tail of an adaptive vocabulary
        monkeypatch.setattr(rehearsal, "_spread", lambda vocabulary, streams, tokens, real=real: real.targets[:streams])
        role = rehearse_role(case.run, VOCABULARY, layout, rank, case.parts, real.cached)
        found = sent(layout, rank, role.calls)
        if case.layout.zero == 3:  # when weights are gathered is not followed
            assert by_operation(found) == by_operation(real.messages), f"rank {rank}"
        else:
            assert found == real.messages, f"rank {rank}"


FAST = [
    Trained(deepspeed(tensor=2, sequence=True, shard_caches=True, optimizer="adam"), ADAPTIVE_TIED),
    Trained(deepspeed(data=2, zero=2, accumulation=2, optimizer="adam")),
    Trained(deepspeed(pipeline=2, accumulation=4, zero=1, layers=(1, 4)), TIED),
    Trained(deepspeed(data=2, zero=3)),
    *rest(
        Trained(deepspeed(tensor=2, pipeline=2, accumulation=2, optimizer="adam")),
        Trained(deepspeed(tensor=2, data=2, zero=2, accumulation=2)),
        *(case for case in ALL if not (case.model.cutoffs and case.layout.accumulation > 1)),
    ),
]


@pytest.mark.parametrize("case", FAST, ids=str)
def test_a_rank_sends_what_is_rehearsed(case: Trained, pools: WorkerPools, monkeypatch: pytest.MonkeyPatch) -> None:
    check(pools, case, monkeypatch)
