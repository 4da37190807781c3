"""The mask on tiles: bit for bit that of parallel/random.py, whose own definition tests/parallel holds to integers."""

import pytest
import torch
from torch import Tensor

from megatron_allattn.kernels.dropout import TileMask, tile_columns
from megatron_allattn.kernels.workspace import Workspace
from megatron_allattn.parallel.random import drop_threshold, keep_mask, keep_scale, row_keys

UNIT = 2.0**-14
CPU = torch.device("cpu")
TYPES = [torch.float32, torch.bfloat16, torch.float64]


def keys(rows: int) -> Tensor:
    return row_keys(2**40 + 3, 1, 5, torch.arange(rows, dtype=torch.int32))


def columns(span: int, persistent: int) -> Tensor:
    """Distances S … 1 as −S … −1, then the persistent vectors."""
    return torch.arange(-span, persistent, dtype=torch.int32)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("probability", [UNIT, 0.01, 0.3, 0.5, 0.777, 1 - 2 * UNIT, 1 - UNIT])
@pytest.mark.parametrize(("span", "persistent"), [(2, 0), (0, 1), (40, 7), (1200, 801)])
def test_a_tile_has_the_documented_mask(span: int, persistent: int, probability: float, dtype: torch.dtype) -> None:
    rows, width = keys(150), span + persistent
    kept = keep_mask(rows[:, None], columns(span, persistent), probability)
    mask = TileMask(Workspace(), probability)
    mask.draw(rows, tile_columns(span, persistent, CPU), width, dtype)
    source = torch.randn(150, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = source.clone()
    out = torch.full_like(source, torch.nan)
    assert mask.apply_(source, out=out) is out
    assert torch.equal(source, before)
    assert torch.equal(out, torch.where(kept, source, 0))
    mask.apply_(source)  # in place, and the same mask again
    assert torch.equal(source, out)
    if width > 1000:  # both kinds of elements are there, as many as they should be
        share = kept.double().mean().item()
        assert share == pytest.approx(1 - probability, abs=4 * (probability * (1 - probability) / kept.numel()) ** 0.5)


def test_a_mask_does_not_depend_on_the_tile_or_on_how_far_a_head_looks() -> None:
    rows, probability = keys(64), 0.4

    def kept(first: int, last: int, span: int, persistent: int) -> Tensor:
        mask = TileMask(Workspace(), probability)
        mask.draw(rows[first:last], tile_columns(span, persistent, CPU), span + persistent, torch.float32)
        return mask.apply_(torch.ones(last - first, span + persistent)) > 0

    whole = kept(0, 64, 100, 9)
    assert torch.equal(kept(17, 40, 100, 9), whole[17:40])
    assert torch.equal(kept(0, 64, 30, 9), whole[:, 70:])  # the nearest 30 distances and all vectors
    assert torch.equal(kept(0, 64, 100, 4), whole[:, :104])


def test_a_new_draw_replaces_the_mask() -> None:
    workspace, probability = Workspace(), 0.5
    mask, ones = TileMask(workspace, probability), torch.ones(8, 20)
    pairs = tile_columns(20, 0, CPU)
    for rows in (keys(16)[:8], keys(16)[8:]):
        mask.draw(rows, pairs, 20, torch.float32)
        found = mask.apply_(ones.clone()) > 0
        assert torch.equal(found, keep_mask(rows[:, None], columns(20, 0), probability))


def test_what_is_kept_is_scaled_by_the_share_that_is_kept() -> None:
    for probability in (UNIT, 0.1, 0.3, 1 - UNIT):
        assert keep_scale(probability) * (1 - drop_threshold(probability) * UNIT) == pytest.approx(1, abs=1e-12)
    assert [drop_threshold(p) for p in (0.0, UNIT, 0.3, 0.5, 1 - UNIT)] == [0, 1, 4915, 8192, 16383]
