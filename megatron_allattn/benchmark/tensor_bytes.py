"""The bytes of tensors on a CPU, as PyTorch's profiler sees them come and go."""

import json
import tempfile
from collections.abc import Callable

import torch

LAST = "the part that is measured"


def profiled_peak(action: Callable[[], object], last: Callable[[], object], times: int = 1) -> int:
    """Run both; the highest sum of bytes allocated since the start of `action` and not yet freed, during `last`.

    times: that `last` is run, of which the lowest counts: where a collective's thread happens to free a tensor last,
    it is counted for longer than it is there.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        action()
        for _ in range(times):
            with torch.profiler.record_function(LAST):
                last()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        with open(file.name) as trace:
            events = json.load(trace)["traceEvents"]
    steps = [event for event in events if event.get("name") == LAST]
    memory = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    live: dict[int, int] = {}
    total, highest = 0, [0] * times
    for event in memory:
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            # What the thread of a collective has freed is not reported: it shows when its place is given away again.
            gone = [start for start, length in live.items() if start < address + size and address < start + length]
            total += size - sum(live.pop(start) for start in gone)
            live[address] = size
        else:
            total -= live.pop(address, 0)
        for place, step in enumerate(steps):
            if 0 <= event["ts"] - step["ts"] <= step["dur"]:
                highest[place] = max(highest[place], total)
    return min(highest)
