"""What a report shows besides metrics: persistent vectors against loops in float64, and at several layouts."""

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_allattn.kernels.interface import AttentionSettings, BlockState, LayerWeights
from megatron_allattn.training import loop
from megatron_allattn.training.evaluation import evaluate
from megatron_allattn.training.observations import POSITIONS, HeadUse, Use, observe_evaluation
from tests.support.attention_problems import answer, make
from tests.support.pool import WorkerPools
from tests.support.slow_attention import slow_attend
from tests.support.trajectories import MODEL, Case, build

VOCABULARY = 11
TOKENS = np.random.default_rng(5).integers(0, VOCABULARY, 8 * 110).astype(np.uint8)
LAYOUTS = [
    pytest.param(Case(tensor=2), marks=pytest.mark.layouts),
    pytest.param(Case(data=2, accumulation=2), marks=pytest.mark.layouts),
    pytest.param(Case(tensor=2, sequence=True, shard_caches=True), marks=pytest.mark.layouts),
    Case(data=2, zero=3, engine="deepspeed"),
    Case(tensor=2, pipeline=2, zero=1, engine="deepspeed", accumulation=2),
]


def test_the_use_of_a_head_by_hand() -> None:
    use = Use.of(torch.tensor([0.25, 0.125, 0.125, 0.0]))
    assert use == Use(0.5, pytest.approx(2**1.5, rel=1e-5), 0.5, 1)
    even = Use.of(torch.full((200,), 0.001))
    assert even.effective_vectors == pytest.approx(200) and even.dead_vectors == 0
    assert Use.of(torch.tensor([1.0] + [0.0009] * 9)).dead_vectors == 9  # an equal part is a tenth of 1.0081
    assert Use.of(torch.tensor([1.0] + [0.0011] * 9)).dead_vectors == 0


@pytest.mark.parametrize("normalization", ["span", "window"])
@pytest.mark.parametrize("case", [{}, {"cache_length": 3}, {"cached": 2, "empty_cache": "mask"}, {"block_length": 5}])
def test_use_against_loops(normalization: str, case: dict[str, Any]) -> None:
    """An output is the attention itself where values are zero and the persistent ones are unit vectors."""
    count, heads = 4, [5, 2, 3]
    case = {"block_length": POSITIONS + 6} | case
    problem = make(persistent=count, size=count, heads=heads, layer=7, normalization=normalization, **case)
    unit = torch.eye(count, dtype=torch.float64).expand(len(heads), -1, -1)
    shown = replace(problem, value=torch.zeros_like(problem.value), persistent_value=unit)
    attention = slow_attend(shown)[0].unflatten(-1, (len(heads), count))  # [M, H, N] of the first stream
    means = attention[-POSITIONS:].mean(dim=0)

    use = HeadUse()

    def show(
        block: torch.Tensor,
        cache: torch.Tensor,
        weights: LayerWeights,
        settings: AttentionSettings,
        state: BlockState,
    ) -> torch.Tensor:
        for _ in range(2):  # the mean of two blocks that are the same
            use(block, cache, weights, settings, state)
        return block

    with torch.no_grad():
        answer(show, problem)
    found = use.found()
    assert found.keys() == {(7, head) for head in heads}
    for row, head in enumerate(heads):
        parts = (means[row] / means[row].sum()).tolist()
        assert found[7, head].persistent_share == pytest.approx(means[row].sum().item(), rel=1e-5)
        assert found[7, head].largest_vector == pytest.approx(max(parts), rel=1e-5)
        entropy = -sum(part * math.log(part) for part in parts)
        assert found[7, head].effective_vectors == pytest.approx(math.exp(entropy), rel=1e-5)


def observed(rank: int, world_size: int, case: Case) -> tuple[float, float, list[dict[str, Any]]]:
    """The loss without and with somebody who looks, and what is seen."""
    engine = build(case, VOCABULARY)
    use, spans = HeadUse(), engine.spans()
    plain, found = evaluate(engine, TOKENS, spans, 0), evaluate(engine, TOKENS, spans, 0, observe=use)
    assert plain is not None and found is not None
    return plain.loss, found.loss, observe_evaluation(engine, spans, use, 30)


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_observations_depend_on_no_layout_and_change_nothing(pools: WorkerPools, case: Case) -> None:
    case = replace(case, spread=True)
    [(_, _, [alone, memory])] = pools(1).run(observed, case.single())
    assert memory["peak_bytes"] > 2**20 and memory["device"] == "host"
    shape = (MODEL.num_layers, MODEL.num_attention_heads)
    assert all(np.shape(value) == shape for name, value in alone.items() if name not in ("kind", "step"))
    for plain, loss, [heads, _] in pools(case.world_size).run(observed, case):
        assert plain == loss
        assert (heads["kind"], heads["step"], heads.keys()) == ("heads", 30, alone.keys())
        for name in heads.keys() - {"kind", "step"}:
            assert heads[name] == [pytest.approx(row, rel=1e-4) for row in alone[name]], name


def asked(rank: int, world_size: int, kind: str) -> tuple[int, list[str]]:
    """How often an evaluation in training asks for the spans, and what it records."""
    engine, times, records = build(Case(spread=True), VOCABULARY), [], []
    spans = engine.spans
    engine.spans = lambda: times.append(1) or spans()
    session = SimpleNamespace(
        run=engine.run,
        engine=engine,
        step=30,
        agree_to_stop=lambda: False,
        describe_loss=str,
        dataset=SimpleNamespace(tokenizer=SimpleNamespace(unit="byte")),
        watch=SimpleNamespace(section=lambda *_: nullcontext()),
        metrics=SimpleNamespace(write=lambda record: records.append(record["kind"])),
        observations=SimpleNamespace(write=lambda record: records.append(record["kind"])),
    )
    loop._evaluate(session, SimpleNamespace(say=lambda line: None), kind, TOKENS)
    return len(times), records


@pytest.mark.parametrize(("kind", "records"), [("valid", ["heads", "memory", "valid"]), ("test", ["test"])])
def test_the_spans_are_gathered_once(pools: WorkerPools, kind: str, records: list[str]) -> None:
    assert pools(1).run(asked, kind) == [(1, records)]
