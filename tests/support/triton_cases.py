"""A program: the Triton backend in Triton's interpreter, on a CPU, beside eager in float64. Prints JSON.

The interpreter is chosen when triton is imported, hence a process of its own: TRITON_INTERPRET=1 python THIS.
Triton's heads have at least 16 channels and its tiles 16 rows; spans and blocks here are just long enough for several
tiles, because a tile takes the interpreter milliseconds. THIS takes one argument, JSON: the `cases` of CASES, and what
`masks` is asked.
"""

import json
import sys

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from megatron_allattn.kernels import eager
from megatron_allattn.kernels.triton_attention import Triton
from megatron_allattn.kernels.triton_launch import Tile, Tiles
from megatron_allattn.kernels.triton_tiles import column_factor, keep_factor, pair_bits
from megatron_allattn.parallel.random import drop_threshold
from tests.support.attention_problems import CASES, answer, converted, far, gradients, make

INTERPRETERS_DOT = InterpreterBuilder.create_dot
SMALL, TALL, WIDE = (Tile(rows, columns, 4, 1) for rows, columns in ((16, 16), (32, 16), (16, 32)))
TILES = Tiles(forward=SMALL, backward=WIDE, context=WIDE, persistent=TALL, position=WIDE)
OTHER_TILES = Tiles(forward=TALL, backward=SMALL, context=TALL, persistent=SMALL, position=SMALL)

LONG = {"batch": 1, "num_heads": 2, "block_length": 20, "max_span": 40, "persistent": 21, "ramp": 5}
DROPS = {"dropout": (0.3, 2**40 + 5, 9, [7]), "heads": [4, 5], "layer": 2}
# (problem, how far each head is said to look, tiles)
LONG_CASES = {
    "several tiles": (LONG, None, TILES),
    "several tiles, known spans": (LONG | {"z": (0.0, 0.51)}, (6, 27), OTHER_TILES),
    "several tiles, known spans, dropout": (LONG | DROPS | {"z": (0.25, 1.0)}, (16, 40), TILES),
    "several tiles, positions on values, dropout": (
        LONG | DROPS | {"z": (0.1, 0.3), "position_values": "shared"},
        (10, 18),
        OTHER_TILES,
    ),
    "several tiles, a masked short cache, dropout": (
        LONG | DROPS | {"cache_length": 20, "cached": 11, "empty_cache": "mask", "window": 33},
        None,
        OTHER_TILES,
    ),
    "several tiles, fixed spans, dropout": (LONG | DROPS | {"adaptive": False, "persistent": 0}, None, TILES),
    "a block shorter than the spans": (LONG | {"block_length": 3, "z": (0.3, 0.9)}, (18, 40), TILES),
    "three streams": (LONG | {"batch": 3, "block_length": 18, "max_span": 18, "persistent": 3}, None, OTHER_TILES),
    "one head, one vector": (LONG | {"num_heads": 1, "persistent": 1, "z": (0.5,)}, (26,), TILES),
    "heads of 32": (LONG | {"size": 32, "block_length": 17, "z": (0.5, 0.2)}, (26, 14), TILES),
    "a ramp of one, z at both ends": (LONG | {"z": (0.0, 1.0), "ramp": 1, "block_length": 17}, (2, 40), OTHER_TILES),
}


def differences(options: dict, spans: tuple[int, ...] | None, tiles: Tiles) -> dict[str, float]:
    """Of output and gradients in float32 from eager's in float64, each relative to its largest element."""
    options = {"size": 16, **options, "normalization": "span"}
    # both from the same float64 numbers: z·L is whole in float32 wherever it is in float64
    problem, exact = make(**options, dtype=torch.float32), make(**options)
    found, expected = answer(Triton(tiles), problem, spans), answer(eager.attend, exact)
    assert found.dtype == torch.float32 and found.shape == expected.shape
    true, grads = gradients(expected, exact), gradients(found, problem)
    size = max(gradient.abs().max().item() for gradient in true.values())
    result = {name: far(grads[name], gradient, least=1e-6 * size) for name, gradient in true.items()}
    return {"output": far(found, expected), **result}


def half_differences(dtype: torch.dtype) -> dict[str, float]:
    """As `differences`, in half precision, from eager's float64 on the same rounded numbers."""
    problem = converted(make(**LONG, **DROPS, size=16, z=(0.25, 0.5), normalization="span"), dtype)
    exact = converted(problem, torch.float64)
    found, expected = answer(Triton(TILES), problem, (16, 26)), answer(eager.attend, exact)
    true, grads = gradients(expected, exact), gradients(found, problem)
    return {"output": far(found, expected), **{name: far(grads[name], true[name]) for name in true}}


def _dot(builder, a, b, d, *rest):
    """In place of the interpreter's product, which takes the bits of bfloat16 numbers for integers (triton 3.9)."""
    a, b = (builder.create_fp_ext(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return INTERPRETERS_DOT(builder, a, b, d, *rest)


@triton.jit
def _masks(keys, pairs_out, columns_out, threshold, COLUMNS: tl.constexpr):
    """Masks of one row for the columns −COLUMNS … COLUMNS − 1, by pairs and by columns."""
    key = tl.load(keys + tl.program_id(0))
    pairs = tl.arange(0, COLUMNS) - COLUMNS // 2
    bits = pair_bits(key, pairs)
    row = tl.program_id(0) * 2 * COLUMNS + COLUMNS
    for odd in tl.static_range(2):
        tl.store(pairs_out + row + 2 * pairs + odd, keep_factor(bits, odd, threshold, 1.0))
    columns = tl.arange(0, 2 * COLUMNS) - COLUMNS
    tl.store(columns_out + row + columns, column_factor(key, columns, threshold, 1.0))


def masks(probabilities: list[float], keys: list[int], columns: int) -> list[list[list[list[int]]]]:
    """For each probability what the kernels keep in rows of these keys, columns −C … C − 1: by pairs and one by one."""
    rows, result = torch.tensor(keys, dtype=torch.int32), []
    for probability in probabilities:
        found = torch.full((2, len(keys), 2 * columns), -1.0)
        _masks[(len(keys),)](rows, found[0], found[1], drop_threshold(probability), COLUMNS=columns)
        result.append(found.int().tolist())
    return result


def evaluated() -> dict[str, float | bool]:
    """Without gradients: the output beside eager's, and whether it asks for gradients."""
    problem = make(**LONG, **DROPS, size=16, normalization="span", dtype=torch.float32)
    problem.dropout = None
    with torch.no_grad():
        found, expected = answer(Triton(TILES), problem), answer(eager.attend, converted(problem, torch.float64))
    return {"difference": far(found, expected), "requires_grad": found.requires_grad}


def repeated() -> bool:
    """Whether two equal calls give equal bits, whether or not projections are kept."""
    results = []
    for kept in (True, False):
        problem = make(**LONG, **DROPS, size=16, normalization="span", dtype=torch.float32)
        output = answer(Triton(TILES), problem, keep_projections=kept)
        results.append([output.detach(), *gradients(output, problem).values()])
    return all(torch.equal(*pair) for pair in zip(*results, strict=True))


if __name__ == "__main__":
    InterpreterBuilder.create_dot = _dot
    request = json.loads(sys.argv[1])
    report = {name: differences(CASES[name], None, TILES) for name in request.pop("cases")}
    report |= {name: differences(*case) for name, case in LONG_CASES.items()}
    print(
        json.dumps(
            {
                "differences": report,
                "half": {str(dtype): half_differences(dtype) for dtype in (torch.bfloat16, torch.float16)},
                "masks": masks(**request),
                "evaluated": evaluated(),
                "repeated": repeated(),
            }
        )
    )
