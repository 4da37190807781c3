"""How long a run's saves and steps take, for whoever has to ask it to stop in time (cluster/jobs/margin.py).

RUN/pace.json      {"saves": [{"step": 100, "seconds": 12.5, "processes": 64}, …]}, the last of them last
RUN/metrics.jsonl  tokens and tokens a second of every step, from which its seconds follow
"""

from pathlib import Path

from megatron_allattn.checkpoint.files import read_json_lines, write_json_atomic
from megatron_allattn.checkpoint.run_folder import METRICS
from megatron_allattn.config.errors import UsageError
from megatron_allattn.config.json_files import read_json_object

PACE = "pace.json"
_KEPT = 16  # saves, and hundredfold steps: enough to see the slow ones, few enough to forget another machine's


def record_save(run_folder: Path, step: int, seconds: float, processes: int) -> None:
    """Add a save that has ended well. Raises StorageError."""
    saves = [*_saves(run_folder), {"step": step, "seconds": seconds, "processes": processes}]
    write_json_atomic(run_folder / PACE, {"saves": saves[-_KEPT:]})


def longest_save(run_folder: Path) -> float | None:
    """Seconds of the longest of the last saves, None where none has been measured."""
    seconds = [save["seconds"] for save in _saves(run_folder)]
    return max((float(one) for one in seconds if isinstance(one, int | float)), default=None)


def longest_step(run_folder: Path) -> float | None:
    """Seconds of the longest of the last steps, None where none has been measured. Raises UsageError: bad records."""
    steps = [one for one in read_json_lines(run_folder / METRICS) if one.get("kind") == "train"]
    if len(steps) < 2:
        return None
    for one in steps:
        if type(one.get("tokens")) is not int or not isinstance(one.get("tokens_per_second"), int | float | None):
            raise UsageError(f"{run_folder / METRICS}: step {one.get('step')!r:.40} lacks its tokens or its speed")
    tokens = steps[-1]["tokens"] - steps[-2]["tokens"]
    rates = [one["tokens_per_second"] for one in steps[-100 * _KEPT :]]
    return max((tokens / rate for rate in rates if rate), default=None)


def _saves(run_folder: Path) -> list[dict[str, float]]:
    """Those on record; none where the file is not what `record_save` writes: it is a convenience, never an obstacle."""
    if not (run_folder / PACE).exists():
        return []
    try:
        saves = read_json_object("file", run_folder / PACE, "remove it").get("saves")
    except UsageError:
        return []
    return [one for one in saves if isinstance(one, dict) and "seconds" in one] if isinstance(saves, list) else []
