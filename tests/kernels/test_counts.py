"""What the heads of `blocked` say that they have computed."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_allattn.kernels.blocked import Blocked
from megatron_allattn.kernels.compiled import load_library
from tests.support.attention_problems import answer, make
from tests.support.slow_attention import Problem

SPANS = (20, 61, 33, 5)
ROWS = 4 * 3 * 44  # of four streams, 130 tokens in three tiles
COLUMNS = [32 + 33, 64 + 33, 48 + 33, 16 + 33]  # distances in steps of 16, and persistent vectors


def problem(layer: int, dtype: torch.dtype = torch.float32) -> Problem:
    return make(
        batch=4, num_heads=4, size=5, persistent=33, max_span=61, z=[0.25, 1.0, 0.46, 0.0], ramp=4,
        block_length=130, cache_length=29, dropout=(0.3, 1, 1, [0, 1, 2, 3]), layer=layer, dtype=dtype,
        normalization="span",
    )  # fmt: skip


class Softmaxes(TorchDispatchMode):
    """Counts the elements of every softmax that is computed."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.softmax, torch.ops.aten._softmax):
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("compiled", [False, True], ids=["pytorch", "compiled"])
def test_counts_are_rows_times_columns_of_every_head(compiled: bool) -> None:
    library, how = load_library() if compiled else (None, "")
    if compiled and library is None:
        pytest.skip(how)
    blocked = Blocked(library)
    with Softmaxes() as softmaxes:
        output = answer(blocked, problem(3), SPANS)
        assert blocked.scored.by_layer() == {3: [ROWS * columns for columns in COLUMNS]}
        output.sum().backward()  # which computes them once more
    assert blocked.scored.by_layer() == {3: [2 * ROWS * columns for columns in COLUMNS]}
    assert softmaxes.elements == (0 if compiled else 2 * ROWS * sum(COLUMNS))
    answer(blocked, problem(1), SPANS)
    assert list(blocked.scored.by_layer()) == [1, 3]
    blocked.scored.clear()
    assert blocked.scored.by_layer() == {}
    answer(blocked, problem(1, torch.float64))  # nobody says how far they look: the window
    assert blocked.scored.by_layer() == {1: [ROWS * (64 + 33)] * 4}
