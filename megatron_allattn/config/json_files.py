"""Reading JSON files that anybody may have written: a result or one line, in a bounded amount of memory."""

import json
from pathlib import Path
from typing import Any

from megatron_allattn.config.checks import check_regular
from megatron_allattn.config.errors import unreadable, usage_error

_PIECE = 2**20
MAX_BYTES = 64 * 2**20
MAX_TOKENIZER_BYTES = 256 * 2**20
"""Of what a tokenizer is read from: some ten million words."""
MAX_STATE_BYTES = 4 * MAX_TOKENIZER_BYTES
"""Of what has such a tokenizer in it, each word on a line of its own."""


def read_bytes(what: str, path: Path, fix: str, limit: int = MAX_BYTES) -> bytes:
    """A file's bytes, at most `limit`. Raises UsageError `WHAT PATH: RULE; FIX`: no such file, or a larger one."""
    try:
        check_regular(what, path, fix)
        content = bytearray()
        with path.open("rb") as handle:
            while len(content) <= limit and (piece := handle.read(_PIECE)):  # to ask for the limit would allocate it
                content += piece
    except OSError as error:
        raise unreadable(what, path, error, fix) from None
    if len(content) > limit:
        raise usage_error(what, path, f"has more than {limit:,} bytes, the most that is read of it", fix)
    return bytes(content)


def parse_json(what: str, path: Path, content: bytes, fix: str) -> Any:
    """The value in a file's bytes. Raises UsageError: they are not JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise usage_error(what, path, f"is not JSON ({error})", fix) from None


def read_json(what: str, path: Path, fix: str, limit: int = MAX_BYTES) -> Any:
    """The value in a JSON file of at most `limit` bytes. Raises UsageError: it is none."""
    return parse_json(what, path, read_bytes(what, path, fix, limit), fix)


def read_json_object(what: str, path: Path, fix: str, limit: int = MAX_BYTES) -> dict[str, Any]:
    """The same, of an object. Raises UsageError: it holds something else."""
    content = read_json(what, path, fix, limit)
    if not isinstance(content, dict):
        raise usage_error(what, path, "holds no object", fix)
    return content
