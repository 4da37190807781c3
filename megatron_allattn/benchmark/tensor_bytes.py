"""The bytes of tensors on a CPU, as PyTorch's profiler sees them come and go."""

import json
import tempfile
from collections.abc import Callable

import torch

LAST = "the part that is measured"


def profiled_peak(action: Callable[[], object], last: Callable[[], object]) -> int:
    """Run both; the highest sum of bytes allocated since the start of `action` and not yet freed, during `last`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        action()
        with torch.profiler.record_function(LAST):
            last()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        with open(file.name) as trace:
            events = json.load(trace)["traceEvents"]
    step = next(event for event in events if event.get("name") == LAST)
    memory = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    live: dict[int, int] = {}
    total = highest = 0
    for event in memory:
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            # What the thread of a collective has freed is not reported: it shows when its place is given away again.
            gone = [start for start, length in live.items() if start < address + size and address < start + length]
            total += size - sum(live.pop(start) for start in gone)
            live[address] = size
        else:
            total -= live.pop(address, 0)
        if 0 <= event["ts"] - step["ts"] <= step["dur"]:
            highest = max(highest, total)
    return highest
