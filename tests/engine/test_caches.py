"""Caches: what is written is read after the commit, and only then."""

import pytest
import torch

from megatron_allattn.engine.caches import CacheSlot
from megatron_allattn.model.span import cache_length


def _slot(layers: int = 2) -> CacheSlot:
    return CacheSlot(range(layers), 3, 4, torch.float32, torch.device("cpu"))


def test_starts_empty() -> None:
    slot = _slot()
    assert slot.read(0).shape == (3, 0, 4) and slot.length == 0


def test_a_write_is_read_after_the_commit_only() -> None:
    slot = _slot()
    first, second = torch.full((3, 5, 4), 1.0), torch.full((3, 7, 4), 2.0)
    slot.write(0, first)
    slot.write(1, second)
    assert slot.read(0).shape[1] == 0
    slot.write(0, first)  # a repeated forward writes the same again
    slot.commit(5)
    assert slot.read(0) is first and slot.read(1) is second and slot.length == 5


def test_a_commit_wants_every_layer() -> None:
    slot = _slot()
    slot.write(0, torch.zeros(3, 5, 4))
    with pytest.raises(AssertionError, match="a layer has not written"):
        slot.commit(5)


def test_clear_and_restore() -> None:
    slot = _slot(1)
    slot.restore([torch.ones(3, 6, 4)], 9)
    assert slot.read(0).sum() == 72 and slot.length == 9
    slot.write(0, torch.zeros(3, 2, 4))
    slot.clear()
    assert slot.read(0).shape[1] == 0 and slot.length == 0
    slot.write(0, torch.ones(3, 1, 4))
    slot.commit(1)
    assert slot.read(0).shape[1] == 1


@pytest.mark.parametrize(
    ("window", "longest", "kept"), [(64, 256, 128), (192, 256, 256), (256, 256, 256), (24, 24, 24)]
)
def test_a_cache_keeps_one_step_more_than_the_window(window: int, longest: int, kept: int) -> None:
    assert cache_length(window, longest) == kept
