"""A plan as a table, as JSON, and in words."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from megatron_allattn.cluster.planning.devices import Device
from megatron_allattn.cluster.planning.plan import Candidate, Task
from megatron_allattn.cluster.planning.step_time import as_dict

GB = 1e9
HEADER = (
    *("", "TP×PP×DP", "ZeRO", "with", "streams", "memory GB"),
    *("weights", "grads", "optim", "caches", "activ", "buffers"),
    *("in node GB", "between GB", "bubble", "step s", "tokens/s", "to the end"),
)


def table(candidates: Sequence[Candidate], first: int = 1) -> list[str]:
    """Lines: a header, then one for each that can run. GB are 10⁹ bytes of the rank that needs or sends most."""
    rows = [HEADER, *(_row(number, one) for number, one in enumerate(candidates, start=first))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _row(number: int, one: Candidate) -> tuple[str, ...]:
    memory, time = one.memory, one.time
    assert memory is not None and time is not None
    micro = one.choice.micro_batch_size
    parts = (f"{size / GB:.1f}" for size in memory.parts.values())
    links = (f"{one.sent[link].num_bytes / GB:.1f}" for link in ("node", "network"))
    return (
        str(number),
        sizes(one),
        str(one.choice.zero_stage),
        extras(one),
        f"{one.slots} × {micro}",
        f"{memory.total / GB:.1f}",
        *parts,
        *links,
        f"{time.bubble:.0%}",
        f"{time.total:.3g}",
        f"{one.tokens_per_second:,.0f}",
        duration(one.seconds_to_end),
    )


def sizes(one: Candidate) -> str:
    """TP×PP×DP."""
    choice = one.choice
    return f"{choice.tensor_model_parallel_size}×{choice.pipeline_model_parallel_size}×{one.data_size}"


def extras(one: Candidate) -> str:
    """sp: sequence parallel, sc: shared caches, r: recomputation."""
    choice, given = one.choice, []
    if choice.sequence_parallel:
        given.append("sp")
    if choice.shard_caches:
        given.append("sc")
    if choice.recompute_granularity != "none":
        given.append(f"r={choice.recompute_granularity}")
    return "+".join(given) or "-"


def refusals(candidates: Sequence[Candidate], most: int) -> list[str]:
    """Of those that cannot run, the nearest ones, one for each TP × PP × ZeRO stage, and how many there are."""
    refused = [one for one in candidates if one.refused is not None]
    if not refused:
        return []
    lines = [f"{len(refused)} layouts do not fit, with full recomputation, or are not predicted; the nearest:"]
    shown: Counter[tuple[str, int]] = Counter()
    for one in refused:
        key = sizes(one), one.choice.zero_stage
        if key not in shown and len(shown) < most:
            shown[key] += 1
            name = (
                f"{sizes(one)} ZeRO {one.choice.zero_stage} {extras(one)} {one.slots} × {one.choice.micro_batch_size}"
            )
            lines.append(f"  {name}: {one.refused}")
    return lines


def sources(device: Device) -> list[str]:
    """Where the rates are from."""
    rates = {
        "memory": device.memory,
        **{f"{name} products": rate for name, rate in device.flops.items()},
        "its memory's bandwidth": device.bandwidth,
        "links in a node": device.node_link,
        "links between nodes": device.network_link,
        "share of products reached": device.reached,
        "share of links reached": device.link_reached,
        "a message": device.message,
    }
    return [f"{name}: {rate.value:.4g}, {rate.source}" for name, rate in rates.items()]


def as_json(task: Task, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Everything. Bytes, seconds and operations."""
    return {
        "recipe": task.run.recipe,
        "nodes": task.nodes,
        "gpus_per_node": task.gpus_per_node,
        "device": task.device.name,
        "rates": sources(task.device),
        "mean_span": sum(map(sum, task.look_back)) / sum(map(len, task.look_back)),
        "longest_span": max(map(max, task.look_back)),
        "layouts": [_one(task, one) for one in candidates],
    }


def _one(task: Task, one: Candidate) -> dict[str, Any]:
    memory, time = one.memory, one.time
    choice = one.choice
    found: dict[str, Any] = {
        "tensor_model_parallel_size": choice.tensor_model_parallel_size,
        "pipeline_model_parallel_size": choice.pipeline_model_parallel_size,
        "data_parallel_size": one.data_size,
        "zero_stage": choice.zero_stage,
        "sequence_parallel": choice.sequence_parallel,
        "shard_caches": choice.shard_caches,
        "micro_batch_size": choice.micro_batch_size,
        "micro_batches": one.slots,
        "recompute_granularity": choice.recompute_granularity,
        "flags": choice.flags(task.run),
        "refused": one.refused,
    }
    if memory is not None:
        found |= {"memory": {**memory.parts, "total": memory.total, "phase": memory.phase, "stage": one.stage}}
        found |= {"memory_limit": one.limit}
    if time is not None:
        found |= {
            "seconds": as_dict(time),
            "bubble": time.bubble,
            "sent": {link: {"bytes": sent.num_bytes, "messages": sent.count} for link, sent in one.sent.items()},
            "tokens_per_second": one.tokens_per_second,
            "seconds_to_end": one.seconds_to_end,
        }
    return found


def duration(seconds: float) -> str:
    """45 s, 3.2 h or 12 d."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} d"
