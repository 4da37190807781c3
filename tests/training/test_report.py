"""What a person reads: a line per interval with means and speeds over it, the header, a bar on terminals only."""

import io
import re
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron_allattn.config import (
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
)
from megatron_allattn.engine.plain import PlainEngine
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.initialization import initialize
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.groups import ALONE, Group, Groups, single_process_groups
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.training.report import Console, clock, header
from megatron_allattn.training.session import Session

RUN = RunConfig(
    model=ModelConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, persistent_memory_size=16, max_attention_span=64
    ),
    training=TrainingConfig(global_batch_size=4, micro_batch_size=2, seq_length=32, train_iters=10),
    logging=LoggingConfig(log_interval=2),
)


def session(step: int = 0, *, first_rank: bool = True, last_step: int = 10) -> Session:
    """Only what the console looks at."""
    parts = {"run": RUN, "first_rank": first_rank, "step": step, "describe_loss": lambda loss: f"bpc {loss / 2:.4f}"}
    return cast(Session, SimpleNamespace(**parts, last_step=last_step))


def record(step: int, loss: float) -> dict[str, Any]:
    numbers = {"lr": 0.00125, "grad_norm": 1.2345, "span_mean": 33.4, "span_max": 40.6}
    return {"kind": "train", "step": step, "loss": loss, **numbers}


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that says what stands in this list."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_line_per_interval_with_the_mean_of_its_losses(
    capsys: pytest.CaptureFixture[str], seconds: list[float]
) -> None:
    """128 tokens a step: two steps in 4 s are 64 tokens/s, and 8 more steps at 2 s each are 16 s."""
    console = Console(session())
    for step, loss, now in ((1, 4.0, 103.0), (2, 3.0, 104.0), (3, 2.0, 104.5), (4, 1.0, 108.0)):
        seconds[0] = now
        console.step(record(step, loss))
    rest = "lr 1.25e-03 | grad norm 1.23 | span 33 (max 41)"
    assert capsys.readouterr().out.splitlines() == [
        f"step  2/10 | loss 3.5000 | bpc 1.7500 | {rest} | 64 tokens/s | 0m16s left",
        f"step  4/10 | loss 1.5000 | bpc 0.7500 | {rest} | 64 tokens/s | 0m12s left",
    ]


def test_a_resumed_run_counts_its_own_steps_and_tells_the_last(
    capsys: pytest.CaptureFixture[str], seconds: list[float]
) -> None:
    console = Console(session(step=8))
    seconds[0] = 102.0
    console.step(record(9, 4.0))
    assert capsys.readouterr().out == ""
    seconds[0] = 104.0
    console.step(record(10, 2.0))
    assert re.search(r"step 10/10 \| loss 3\.0000 .* 64 tokens/s \| 0m00s left", capsys.readouterr().out)


def test_a_plateau_changes_the_last_step(capsys: pytest.CaptureFixture[str], seconds: list[float]) -> None:
    run = session(step=0)
    console = Console(run)
    run.last_step = 3  # type: ignore[misc]  (a property of the real one)
    for step in (1, 2, 3):
        seconds[0] += 1
        console.step(record(step, 4.0))
    assert [line.split(" |")[0] for line in capsys.readouterr().out.splitlines()] == ["step 2/3", "step 3/3"]


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(session(first_rank=False))
    console.say("hello")
    for step in (1, 2):
        console.step(record(step, 1.0))
    console.close()
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    console = Console(session(step=3))
    console.step(record(4, 1.25))
    console.close()
    assert " 3/10 [" in screen.getvalue()
    assert "loss 1.2500" in screen.getvalue()
    assert screen.getvalue().rpartition("\r")[0].endswith(" ")  # wiped out at the end
    assert capsys.readouterr().out.startswith("step  4/10 | loss 1.2500 | ")


def test_no_bar_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(session())
    console.step(record(1, 1.25))
    console.close()
    assert capsys.readouterr() == ("", "")


def test_clock() -> None:
    found = [clock(seconds) for seconds in (0, 9.4, 59.6, 90, 3599.7, 3661, 100 * 3600)]
    assert found == ["0m00s", "0m09s", "1m00s", "1m30s", "1h00m", "1h01m", "100h00m"]


def header_of(run: RunConfig, groups: Groups | None = None) -> list[str]:
    groups = groups or single_process_groups()
    fused = FusedOps("torch")
    network = Network(run.model, 256, ALONE, fused)
    initialize(network, 1)
    engine = PlainEngine(network, run, groups, torch.device("cpu"), torch.float32, fused)
    dataset = SimpleNamespace(description="some text")
    return header(cast(Session, SimpleNamespace(run=run, engine=engine, dataset=dataset, notes=["one", "two"])))


def test_header_says_what_runs() -> None:
    """27,528 = 2 layers × (4 · 32² projections + 2 · 4 · 16 · 8 persistent + 4 spans + 2 · 32 norm) + 64 · 8 positions
    + 256 · 32 embedding + 256 · 33 output; 2 · 1024 of them are persistent vectors.
    """
    rows = header_of(RUN)
    assert rows[:3] == [
        "model       custom: all-attn, 2 layers, hidden 32, 4 heads, 16 persistent vectors, adaptive span ≤ 64",
        "parameters  27,528, 7 % in persistent vectors",
        "data        some text",
    ]
    assert rows[3].startswith("layout      1 × cpu: TP 1 × DP 1, ZeRO 0, fp32, ")
    assert rows[4] == "step        4 streams × 32 tokens = 128 tokens; 10 steps"
    # Adam: weights, gradients and two moments of 4 bytes each; 0.42 MiB
    assert rows[5].startswith(f"memory      {27_528 * 16 / 2**20:.1f} MiB of weights, gradients and optimizer, ")
    assert rows[6:] == ["note        one", "note        two"]


def test_shared_caches_are_a_part_on_every_rank() -> None:
    """4 streams × 512 positions × 512 channels × 4 bytes × 2 layers, or half of that for each of two shards."""
    wide = replace(RUN, model=replace(RUN.model, hidden_size=512, max_attention_span=512, adaptive_span=False))
    pair = Groups(Layout(tensor_size=2), rank=0, world=ALONE, tensor=Group((0, 1), 0, None), data=ALONE)
    for shared, mebibytes in ((False, 8.0), (True, 4.0)):
        parallel = ParallelConfig(tensor_model_parallel_size=2, shard_caches=shared)
        rows = header_of(replace(wide, parallel=parallel), pair)
        assert f", {mebibytes:.1f} MiB of caches at today's spans; " in rows[5]


SMALL = {"num_layers": 1, "hidden_size": 32, "max_attention_span": 64}
FORWARD = {"persistent_memory_size": 0, "feed_forward_size": 128}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            ModelConfig(**SMALL, **FORWARD, variant="transformer", adaptive_span=False),  # type: ignore[arg-type]
            "custom: transformer, 1 layers, hidden 32, 4 heads, ReLU feed-forward 128, span 64",
        ),
        (
            ModelConfig(**SMALL, **FORWARD, variant="ff-attn"),  # type: ignore[arg-type]
            "custom: ff-attn, 1 layers, hidden 32, 4 heads, softmax feed-forward 128, adaptive span ≤ 64",
        ),
        (
            ModelConfig(
                **SMALL,  # type: ignore[arg-type]
                variant="head-split",
                adaptive_cutoffs="20,90",
                untie_embeddings_and_output_weights=False,
            ),
            "custom: head-split, 1 layers, hidden 32, 4 heads, 256 persistent vectors, adaptive span ≤ 64, "
            "adaptive vocabulary cut at 20, 90 (÷ 4), tied input and output",
        ),
    ],
)
def test_header_names_the_variant_and_the_vocabulary(model: ModelConfig, words: str) -> None:
    assert header_of(replace(RUN, model=model))[0] == f"model       {words}"


def test_header_says_what_ends_a_run_at_a_plateau() -> None:
    optimizer = OptimizerConfig(lr_decay_style="plateau", plateau_iters=20_000)
    training = replace(RUN.training, train_iters=900_000, eval_interval=1000)
    run = replace(RUN, optimizer=optimizer, training=training)
    words = "128 tokens; at most 900,000 steps, 20,000 of them after a plateau of validation"
    assert header_of(run)[4].endswith(words)
    latest = replace(run, optimizer=replace(optimizer, lr_decay_iters=150_000))
    assert header_of(latest)[4].endswith(f"{words} or step 150,000")


@pytest.mark.parametrize(
    ("unit", "loss", "words"),
    [
        ("token", 3.0, "ppl 20.0855"),
        ("token", 13.8, "ppl 984609.1112"),
        ("token", 13.9, "ppl 1.088e+06"),
        ("token", 700.0, "ppl 1.014e+304"),
        ("byte", 700.0, "bpc 1009.8865"),
        ("token", float("nan"), "ppl nan"),
    ],
)
def test_a_huge_perplexity_is_told_in_few_digits(unit: str, loss: float, words: str) -> None:
    run = SimpleNamespace(dataset=SimpleNamespace(tokenizer=SimpleNamespace(unit=unit)))
    assert Session.describe_loss(cast(Session, run), loss) == words
