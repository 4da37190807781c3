"""Products between queries and the positions just before each of them, without arithmetic on all the others.

The T rows of a tile and the S distances of a head are a band of the tile's scores over its S + T − 1 positions
("skewed": [G, T, S + T − 1], column r + j belongs to row r's column j). Both forms are the same memory seen with
another stride, so that a product over positions is a batched product, and one over distances a plain one.

Memory [S + G·T, K] holds one vector per position, the S before the first row in front.
Shape letters: G tiles, T rows of a tile, S distances, K head size.
"""

from torch import Tensor


def tiling(length: int, longest: int = 64) -> tuple[int, int]:
    """(G, T): rows dealt to tiles as evenly as possible, T at most `longest`; G·T ≥ length."""
    count = -(-length // longest)
    return count, -(-length // count)


STEP = 16  # distances


def columns_of(span: int) -> int:
    """S: the distances that are computed for a head that looks `span` far, a multiple of STEP.

    Products then come in few shapes, whatever the heads have learned: for bfloat16 on a CPU, oneDNN compiles code for
    every shape it has not seen, and keeps a thousand of them.
    """
    return -(-span // STEP) * STEP


def windows(memory: Tensor, tiles: int, tile: int, span: int) -> Tensor:
    """The positions that each tile sees, [G, S + T − 1, K]: overlapping views of `memory` [S + G·T, K]."""
    row, column = memory.stride()
    return memory.as_strided((tiles, span + tile - 1, memory.shape[1]), (tile * row, row, column))


def by_distance(skewed: Tensor, span: int) -> Tensor:
    """The band of contiguous [G, T, S + T − 1] as a view [G, T, S]."""
    tiles, tile, width = skewed.shape
    return skewed.as_strided((tiles, tile, span), (tile * width, width + 1, 1))
