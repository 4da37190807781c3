"""The band of scores around a tile: views against loops."""

import pytest
import torch

from megatron_allattn.kernels.band import by_distance, columns_of, tiling, windows

SHAPES = [(1, 1, 1), (1, 5, 3), (3, 4, 9), (3, 4, 4), (4, 7, 2), (2, 3, 13)]  # G tiles, T rows, S distances


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 2, 5, 63, 64, 65, 127, 128, 129, 130, 512, 1000])
def test_tiles_hold_every_row_and_are_as_even_as_can_be(length: int) -> None:
    tiles, tile = tiling(length)
    assert 1 <= tile <= 64
    assert tiles == -(-length // 64)  # no more tiles than needed
    assert length <= tiles * tile < length + tiles  # fewer rows too many than there are tiles
    assert tiling(length, longest=length) == (1, length)


@pytest.mark.parametrize(("span", "columns"), [(1, 16), (15, 16), (16, 16), (17, 32), (8192, 8192)])
def test_spans_come_in_few_lengths(span: int, columns: int) -> None:
    assert columns_of(span) == columns


@pytest.mark.parametrize(("tiles", "tile", "span"), SHAPES)
def test_windows_are_the_positions_before_and_in_each_tile(tiles: int, tile: int, span: int) -> None:
    memory = numbers(span + tiles * tile, 3)
    found = windows(memory, tiles, tile, span)
    assert found.shape == (tiles, span + tile - 1, 3)
    assert found.data_ptr() == memory.data_ptr()  # no copy
    for g in range(tiles):
        assert torch.equal(found[g], memory[g * tile : g * tile + span + tile - 1])


def test_windows_of_columns_of_a_larger_tensor() -> None:
    memory = numbers(12, 9)[1:, 2:5]
    found = windows(memory, tiles=2, tile=3, span=4)
    for g in range(2):
        assert torch.equal(found[g], memory[3 * g : 3 * g + 6])


@pytest.mark.parametrize(("tiles", "tile", "span"), SHAPES)
def test_the_band_is_a_view_of_the_skewed_scores(tiles: int, tile: int, span: int) -> None:
    skewed = numbers(tiles, tile, span + tile - 1)
    band = by_distance(skewed, span)
    for g in range(tiles):
        for r in range(tile):
            assert torch.equal(band[g, r], skewed[g, r, r : r + span])
    band.zero_()  # writes to the band alone
    row, column = torch.arange(tile)[:, None], torch.arange(span + tile - 1)
    off = (column < row) | (column >= row + span)
    assert ((skewed != 0) == off).all()


def test_the_last_distance_of_a_row_is_the_position_just_before_it() -> None:
    """Scores of a product over windows, seen by distance, are those of each row with the S positions before it."""
    tiles, tile, span = 3, 4, 6
    memory, rows = numbers(span + tiles * tile, 2), numbers(tiles, tile, 2)
    skewed = (rows @ windows(memory, tiles, tile, span).transpose(1, 2)).contiguous()
    band = by_distance(skewed, span)
    for row in range(tiles * tile):
        for column in range(span):  # distances S … 1
            expected = rows.flatten(0, 1)[row] @ memory[span + row - (span - column)]
            torch.testing.assert_close(band.flatten(0, 1)[row, column], expected)
