"""Backends by name: `--attention-backend`, and what is said of the choice."""

import pytest
import torch

from megatron_allattn.kernels import eager
from megatron_allattn.kernels.blocked import Blocked
from megatron_allattn.kernels.compiled import load_library
from megatron_allattn.kernels.registry import choose_backend
from tests.support.attention_problems import answer, make

CPU = torch.device("cpu")


def test_backends_that_are_asked_for() -> None:
    chosen = choose_backend("eager", CPU, torch.float32, 64)
    assert (chosen.name, chosen.note, chosen.attend) == ("eager", "eager (asked for)", eager.attend)
    chosen = choose_backend("blocked", CPU, torch.bfloat16, 64)
    assert (chosen.name, chosen.note) == ("blocked", f"blocked (asked for; {load_library()[1]})")
    assert isinstance(chosen.attend, Blocked)


def test_auto_is_blocked_on_a_cpu_and_the_note_says_why() -> None:
    chosen = choose_backend("auto", CPU, torch.float32, 64)
    assert chosen.name == "blocked" and isinstance(chosen.attend, Blocked)
    assert chosen.note.startswith("blocked (") and "cpu" in chosen.note


def test_a_network_has_scratch_memory_of_its_own() -> None:
    first, second = (choose_backend("blocked", CPU, torch.float32, 64).attend for _ in range(2))
    assert first is not second


@pytest.mark.parametrize("name", ["auto", "eager", "blocked"])
def test_what_is_chosen_computes_attention(name: str) -> None:
    problem = make(normalization="span")
    found = answer(choose_backend(name, CPU, torch.float64, 4).attend, problem)
    torch.testing.assert_close(found, answer(eager.attend, problem), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["triton", "fast", ""])
def test_what_does_not_exist_or_cannot_run_here_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ValueError, match=f"^--attention-backend {name}: ") as refusal:
        choose_backend(name, CPU, torch.float32, 64)
    assert "\n" not in str(refusal.value)
