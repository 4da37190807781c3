"""Whole jobs of tiny networks: what is right passes, with counts worked out by hand; what is broken is refused with the
rank and the place. Broken is the thing itself, on some ranks: its collectives, its weights, its shapes, its schedule.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_allattn.cluster.rehearsal import ownership, pipeline, rehearse, roles
from megatron_allattn.cluster.rehearsal.mismatch import Mismatch
from megatron_allattn.cluster.rehearsal.rehearse import Report
from megatron_allattn.config import RunConfig, UsageError, parse
from megatron_allattn.kernels import outline
from megatron_allattn.model import network
from megatron_allattn.model.attention import SelfAttention
from megatron_allattn.model.network import Network, Part
from megatron_allattn.model.span import AdaptiveSpan
from megatron_allattn.parallel.collectives import all_reduce

VOCABULARY = 101
TINY = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --persistent-memory-size 12 --max-attention-span 96
--seq-length 16 --global-batch-size 12 --micro-batch-size 2 --attention-dropout 0.2 --embedding-dropout 0.1"""
GRID = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --pipeline-layers 2,2"


def run_of(*flags: str) -> RunConfig:
    """Of these flags, of which later ones replace those before them."""
    given: dict[str, list[str]] = {}
    for word in " ".join((TINY, *flags)).split():
        if word.startswith("--"):
            name = word
            given[name] = [word]
        else:
            given[name].append(word)
    return parse([word for words in given.values() for word in words])[0]


def rehearsed(*flags: str, world_size: int = 8) -> Report:
    return rehearse.rehearse(run_of(*(flags or (GRID,))), VOCABULARY, world_size)


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        ("", 1),
        ("--tensor-model-parallel-size 4 --sequence-parallel --shard-caches --bf16 --recompute-granularity full", 12),
        ("--zero-stage 2", 3),
        ("--zero-stage 3 --optimizer adagrad --lr 0.07 --tensor-model-parallel-size 2", 6),
        (f"{GRID} --no-untie-embeddings-and-output-weights --adaptive-cutoffs 20,50 --adaptive-div-value 2", 12),
        (f"{GRID} --pipeline-layers 3,1 --fp16 --zero-stage 0 --attention-backend eager", 8),
        *(
            (f"--variant {variant} --tensor-model-parallel-size 2 --sequence-parallel", 4)
            for variant in ("attn-split", "head-split", "single-head")
        ),
        *(
            (f"--variant {variant} --persistent-memory-size 0 --feed-forward-size 16 {GRID}", 8)
            for variant in ("ff-attn", "transformer")
        ),
    ],
)
def test_what_trains_passes(flags: str, world_size: int) -> None:
    report = rehearsed(flags, world_size=world_size)
    assert report.layout.world_size == world_size
    assert report.owned.elements > 0 and (report.met.calls > 0) == (world_size > 1)


def test_counts_by_hand() -> None:
    """Two stages of two layers, two shards, two replicas of 3 micro-batches (docs/traffic.md)."""
    report = rehearsed()
    # every micro-batch: embedding; a layer both ways; positions of each stage; what enters the output; two of nats
    passes = 3 * (1 + 4 * 2 + 2 + 1 + 2)
    gathers = 3 * (1 + 2)  # of the parts that shards send: behind the first stage, and twice before its backward
    spans, norm = 2 + 2, 1  # the two shards' all-reduce over stages, the two stages' gather; one of all ranks
    per_replica = passes + gathers + spans
    # of each shard: the loss over stages; positions' gradient and value; once for all replicas the loss; of each stage
    # gradients, 3 groups
    shards = 2 * 2 * (1 + 2) + 2 * 1 + 2 * 2 * (1 + 3)
    assert report.met.collectives == 2 * per_replica + shards + norm
    # of each shard and replica: activations, their description and the slot; gradients and their description
    assert report.met.between_stages == 2 * 2 * 3 * (3 + 2)
    assert (report.roles, report.slots, report.ran) == (4, 3, 2)
    layer = 4 * 32 * 32 + 2 * 32 + 4 + 2 * 4 * 8 * 12
    assert report.owned.elements == 2 * VOCABULARY * 32 + VOCABULARY + 8 * 96 + 4 * layer


def slot_of(module: SelfAttention) -> int:
    """The micro-batch that a rank is at."""
    return module.group.handle._script._micro_batch


def additional(like: Callable[[Tensor], Tensor], slots: range | None = None) -> Callable[[Any], None]:
    """Layer 3 calls one collective more on the second shard; slots: in these micro-batches only."""

    def spoil(patch: pytest.MonkeyPatch) -> None:
        forward = SelfAttention.forward

        def spoiled(self: SelfAttention, hidden: Tensor, *rest: Any) -> Tensor:
            if self.layer == 3 and self.group.rank == 1 and (slots is None or slot_of(self) in slots):
                all_reduce(like(hidden), self.group)
            return forward(self, hidden, *rest)

        patch.setattr(SelfAttention, "forward", spoiled)

    return spoil


def another_order(patch: pytest.MonkeyPatch) -> None:
    run_layers = Network.run_layers

    def spoiled(self: Network, hidden: Tensor, context: Any) -> Tensor:
        if self.group.rank == 0 or not self.part.first:
            return run_layers(self, hidden, context)
        key = self.position()
        for layer in reversed(list(self.layers)):
            hidden = layer(hidden, key, context)
        return hidden

    patch.setattr(Network, "run_layers", spoiled)


def narrow_activations(patch: pytest.MonkeyPatch) -> None:
    run_layers = Network.run_layers

    def spoiled(self: Network, hidden: Tensor, context: Any) -> Tensor:
        result = run_layers(self, hidden, context)
        return result[..., :16] if self.part.first else result

    patch.setattr(Network, "run_layers", spoiled)


def sends_first(patch: pytest.MonkeyPatch) -> None:
    """The first stage sends before it receives; so does the second, as DeepSpeed has it."""
    schedule = pipeline.schedule_without_step

    def spoiled(slots: int, group: Any) -> Iterator[list[Any]]:
        for instructions in schedule(slots, group):
            kinds = [type(one).__name__ for one in instructions]
            if group.rank == 0 and kinds[:2] == ["RecvGrad", "SendActivation"]:
                instructions = [instructions[1], instructions[0], *instructions[2:]]
            yield instructions

    patch.setattr(pipeline, "schedule_without_step", spoiled)


def cut_as(*ranges: range) -> Callable[[Any], None]:
    def spoil(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(rehearse, "stage_parts", lambda *_: [Part(one, 4) for one in ranges])

    return spoil


def built_with(spoil: Callable[[Network], None]) -> Callable[[Any], None]:
    """The second shard of the first stage is built otherwise."""

    def patched(patch: pytest.MonkeyPatch) -> None:
        build = roles.stage_network

        def spoiled(run: RunConfig, vocab_size: int, tensor: Any, part: Part, *rest: Any) -> Network:
            built = build(run, vocab_size, tensor, part, *rest)
            if tensor.rank == 1 and part.first:
                spoil(built)
            return built

        patch.setattr(roles, "stage_network", spoiled)

    return patched


def lose_bias(built: Network) -> None:
    norm = built.layers[1].norm1
    bias = norm._parameters.pop("bias")
    norm.bias = bias.detach()


def widen_norm(built: Network) -> None:
    norm = built.layers[1].norm1
    logical = norm.weight.logical
    norm.weight = torch.nn.Parameter(torch.empty(1, 32, device="meta"))
    norm.weight.logical, norm.weight.tensor_model_parallel = logical, False
    norm.forward = lambda x, y: x + y * norm.weight[0] * norm.bias


def heads_twice(patch: pytest.MonkeyPatch) -> None:
    in_order = network.in_order
    patch.setattr(network, "in_order", lambda count, parts: (in_order(count, parts)[0],) * parts)


def span_without_gradient(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdaptiveSpan, "forward", lambda self: self.z.detach().clone())


def spans_in_no_group(patch: pytest.MonkeyPatch) -> None:
    groups = ownership.parameter_groups
    patch.setattr(ownership, "parameter_groups", lambda *a, **k: [one for one in groups(*a, **k) if not one["span"]])


def attention_fails(patch: pytest.MonkeyPatch) -> None:
    attend = outline.attend

    def spoiled(block: Tensor, cache: Tensor, weights: Any, settings: Any, state: Any) -> Tensor:
        if state.layer == 2:
            raise ValueError("no such head")
        return attend(block, cache, weights, settings, state)

    patch.setattr(outline, "attend", spoiled)


BROKEN: dict[str, tuple[Callable[[Any], None], str]] = {
    "a collective more": (
        additional(lambda hidden: hidden.new_zeros(2)),
        r"rank 5 \(tensor 1, data 0, stage 1\) calls all_reduce of \[2\] float32 in the group tensor 4, 5 "
        r"\(micro-batch 0, forward, layers\.3\.attention\), where rank 4 \(tensor 0, data 0, stage 1\) calls "
        r"all_reduce of .*layers\.3\.attention\.out\): a step would hang",
    ),
    "one more of the size of the next": (
        additional(torch.clone),
        r"rank 5 .* calls all_reduce of \[2, 16, 32\] .*layers\.3\.attention\), where rank 4 .*layers\.3\.attention\.o",
    ),
    "one more in the last micro-batch alone": (
        additional(torch.clone, range(2, 3)),
        r"rank 5 .* \(micro-batch 2, forward, layers\.3\.attention\), where rank 4 .* \(micro-batch 2, ",
    ),
    "one more in the middle one, beside the last": (
        additional(torch.clone, range(1, 3)),
        r"rank 5 .* \(micro-batch 1, forward, layers\.3\.attention\), where rank 4 .* \(micro-batch 1, ",
    ),
    "another order": (another_order, r"rank 1 .*layers\.1\.attention\.out\), where rank 0 .*layers\.0\.attention\.out"),
    "a neighbour's shape": (
        narrow_activations,
        r"rank 4 \(tensor 0, data 0, stage 1\) calls recv of \[2, 16, 32\] float32 from rank 0 \(micro-batch 0, "
        r"forward, activations\), where rank 0 .* calls send of \[2, 16, 16\] float32 to rank 4 ",
    ),
    "a schedule in which both send": (
        sends_first,
        r"rank 0 .* calls send of .* to rank 4 .*activations\) and waits for ever for rank 4, while rank 4 .* calls s",
    ),
    "a layer on no stage": (cut_as(range(1), range(2, 4)), r"layers\.1\.query\.weight: 0 of 2 stages have its layer"),
    "a layer on two": (cut_as(range(2), range(1, 4)), r"layers\.1\.query\.weight: 2 of 2 stages have its layer"),
    "a weight that a shard lacks": (
        built_with(lose_bias),
        r"layers\.1\.norm1\.bias: rank 1 \(tensor 1, data 0, stage 0\) does not hold it, and its stage should",
    ),
    "a weight of another shape": (
        built_with(widen_norm),
        r"rank 1 \(tensor 1, data 0, stage 0\) holds \[1, 32\] of layers\.1\.norm1\.weight, its part is \[32\]",
    ),
    "heads on two shards": (
        heads_twice,
        r"layers\.0\.query\.weight: row 0 of 32 is on 2 of ranks 0 to 1, and must be on one",
    ),
    "a weight without gradient": (
        span_without_gradient,
        r"layers\.0\.span gets no gradient on rank 0 \(tensor 0, data 0, stage 0\) in micro-batch 0",
    ),
    "a weight that nothing updates": (spans_in_no_group, r"layers\.0\.span is in 0 groups of the optimizer on rank 0 "),
    "code that fails": (
        attention_fails,
        r"rank 4 \(tensor 0, data 0, stage 1\) fails \(micro-batch 0, forward, layers\.2\.attention\): ValueError: no ",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused_with_rank_and_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, message = BROKEN[name]
    spoil(monkeypatch)
    with pytest.raises(Mismatch) as caught:
        rehearsed()
    assert re.match(message, str(caught.value)), str(caught.value)


def test_where_the_last_micro_batch_differs_all_of_them_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls one collective more on every shard, so the step ends; the others call what they always call."""
    forward = SelfAttention.forward

    def spoiled(self: SelfAttention, hidden: Tensor, *rest: Any) -> Tensor:
        if self.layer == 0 and slot_of(self) == 2:
            all_reduce(hidden.clone(), self.group)
        return forward(self, hidden, *rest)

    before = rehearsed()
    monkeypatch.setattr(SelfAttention, "forward", spoiled)
    report = rehearsed()
    assert report.met.collectives == before.met.collectives + 2  # one for each replica
    assert (before.ran, report.ran) == (2, 3)


@pytest.mark.parametrize(
    ("flags", "world_size", "gpu", "message"),
    [
        ("", 5, None, "--global-batch-size 12: must be a multiple of 10"),
        ("", 2, "h100", "--gpu h100: there is no such device; did you mean h100-80?"),
        (
            "--max-attention-span 65536 --no-adaptive-span --global-batch-size 4096",
            1,
            "v100-32",
            "needs .* GB for caches alone",
        ),
    ],
)
def test_what_does_not_fit_is_refused(flags: str, world_size: int, gpu: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rehearse.rehearse(run_of(flags), VOCABULARY, world_size, gpu=gpu)


def test_nodes_that_are_not_full_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^--gpus-per-node 3: 8 processes leave the last of 3 nodes short; give "):
        rehearse.rehearse(run_of(GRID), VOCABULARY, 8, gpus_per_node=3)


def test_the_vocabulary_is_the_recipes_or_given() -> None:
    assert rehearse.vocabulary_of(parse(["--recipe", "allattn-13b"])[0]) == (50_000, "of the recipe allattn-13b")
    given = parse(["--recipe", "demo", "--vocab-size", "300"])[0]
    assert rehearse.vocabulary_of(given) == (300, "--vocab-size")
    with pytest.raises(UsageError, match="add --vocab-size N"):
        rehearse.vocabulary_of(run_of())


def test_an_unpredictable_deepspeed_json_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "zero.json"
    file.write_text('{"zero_optimization": {"stage": 2, "zero_quantized_gradients": true}}')
    with pytest.raises(UsageError, match="zero_quantized_gradients: its traffic cannot be predicted"):
        rehearsed(f"--deepspeed_config {file}", world_size=2)
