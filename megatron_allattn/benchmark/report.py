"""Results on the screen and in a JSON file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_allattn.config.errors import usage_error

VERSION = 1


def write_json(path: Path | None, benchmark: str, values: Mapping[str, Any]) -> None:
    """Write {"benchmark": …, "version": 1, …values}, unless no file was asked for. Raises UsageError: it fails."""
    if path is None:
        return
    try:
        path.write_text(json.dumps({"benchmark": benchmark, "version": VERSION, **values}, indent=1) + "\n")
    except OSError as error:
        fix = "make room or name another file; what was measured is above"
        raise usage_error("--json", path, f"cannot be written ({error.strerror})", fix) from None


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, columns aligned: the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [f"{'-' * (w - 1)}:" if i else "-" * w for i, w in enumerate(widths)]
    return "\n".join([line(header), f"|{'|'.join(f' {cell} ' for cell in rule)}|", *map(line, rows)])


def machine_lines(machine: Mapping[str, Any], rates: Mapping[str, Any] | None) -> list[str]:
    """What was measured on, in a few lines."""
    threads = f"{machine['threads']} of {machine['cores']} cores, {machine['instructions']}"
    lines = [f"{machine['device']}, {threads}, torch {machine['torch']}"]
    if rates is not None:
        shape = " × ".join([str(machine["gemm_size"])] * 3)
        medians = {name: rates[name]["median"] for name in ("float32", "bfloat16")}
        gemm = ", ".join(f"{name} {rate:.{0 if rate >= 10 else 1}f}" for name, rate in medians.items())
        lines.append(
            f"GEMM of at most {shape}, GFLOP/s: {gemm}; copy {rates['copy']['median']:.1f} GB/s read and written"
        )
        if medians["bfloat16"] < medians["float32"] / 4:
            lines.append(
                "note: this machine has no instructions for bfloat16: products are computed in float32, and shares are "
                "of its GEMM rate"
            )
    return lines


def percent(share: float) -> str:
    """0.034 → 3.4 %."""
    return f"{100 * share:.1f} %"
