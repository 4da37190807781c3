"""What a dry run says: what was checked, with counts, and the memory of the ranks."""

from collections.abc import Iterator

from megatron_allattn.cluster.planning.devices import GB
from megatron_allattn.cluster.rehearsal.memory import Memory
from megatron_allattn.cluster.rehearsal.mismatch import describe
from megatron_allattn.cluster.rehearsal.rehearse import Report
from megatron_allattn.config import RunConfig
from megatron_allattn.config.recipes import in_words
from megatron_allattn.parallel.layout import Layout


def lines(report: Report, run: RunConfig, vocabulary: tuple[int, str], gpus_per_node: int | None) -> Iterator[str]:
    """The report, line by line. vocabulary: its size and who says so."""
    layout, owned, met = report.layout, report.owned, report.met
    axes = [("tensor", layout.tensor_size), ("pipeline", layout.pipeline_size), ("data", layout.data_size)]
    sizes = " × ".join(f"{name} {size}" for name, size in axes if size > 1) or "one process"
    name = run.recipe or "a model"
    yield (
        f"dry run of {name}: {in_words(owned.elements)} parameters, vocabulary {vocabulary[0]:,} ({vocabulary[1]}); "
        f"{_count(layout.world_size, 'rank')}: {sizes}, ZeRO {run.parallel.zero_stage}"
    )
    yield from _nodes(layout, gpus_per_node)
    replicas = f", each the same in {layout.data_size} replicas" if layout.data_size > 1 else ""
    yield f"built: {_count(report.roles, 'rank')}{replicas}"
    yield (
        f"owned: {_count(owned.tensors, 'weight')} of {owned.elements:,} elements: each element held by the ranks that "
        "the layout says, updated once and given a gradient"
    )
    passes = f"all {report.slots}" if report.ran == report.slots else f"the first and the last of {report.slots}"
    yield f"run: {passes} micro-batches of every rank built"
    if met.calls:
        between = f" and {met.between_stages:,} messages between stages" if met.between_stages else ""
        yield (
            f"met: {_count(layout.world_size, 'rank')}, {_count(met.collectives, 'collective')}{between} in "
            f"{_count(len(met.groups), 'group')}: orders, sizes and places match, the step ends on every rank"
        )
    else:
        yield "met: a single rank sends nothing"
    yield from _memory(report.memory, layout)


def _nodes(layout: Layout, gpus_per_node: int | None) -> Iterator[str]:
    """Which groups lie within a node."""
    if gpus_per_node is None or layout.world_size <= gpus_per_node:
        return
    within: list[str] = []
    across: list[str] = []
    groups = {"tensor": layout.tensor_group, "data": layout.data_group, "pipeline": layout.pipeline_group}
    for name, group in groups.items():
        every = [group(rank) for rank in range(layout.world_size)]
        if len(every[0]) > 1:
            one_node = all(len({rank // gpus_per_node for rank in ranks}) == 1 for ranks in every)
            (within if one_node else across).append(name)
    told = [(within, "within a node"), (across, "over several")]
    where = ", ".join(f"{' and '.join(names)} groups {how}" for names, how in told if names)
    yield f"nodes: {layout.world_size // gpus_per_node} of {gpus_per_node} GPUs; {where}"


def _memory(memory: Memory, layout: Layout) -> Iterator[str]:
    if memory.unknown:
        yield f"memory: not predicted: {memory.unknown}"
        return
    names, grows = list(memory.stages[0].start.parts), any(one.longest != one.start for one in memory.stages)
    there = f", of {memory.device.memory_bytes / GB:,.0f} GB of {memory.device.name}" if memory.device else ""
    yield f"memory of the rank that needs most, GB as training starts{there}:"
    header = ["stage", "layers", "rank", *names, "together", *(["spans longest"] if grows else [])]
    rows = [
        [
            str(place),
            f"{one.part.layers.start}-{one.part.layers.stop - 1}",
            str(one.rank),
            *(f"{value / GB:.2f}" for value in (*one.start.parts.values(), one.start.total)),
            *([f"{one.longest.total / GB:.2f}"] if grows else []),
        ]
        for place, one in enumerate(memory.stages)
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        yield "  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
    most = max(memory.stages, key=lambda one: one.start.total)
    yield f"largest: {describe(layout, most.rank)}, {most.start.total / GB:.2f} GB in the phase {most.start.phase}"
    longest = max(one.longest.total for one in memory.stages)
    if memory.device is not None and longest > memory.device.memory_bytes:
        over, name = (longest - memory.device.memory_bytes) / GB, memory.device.name
        yield f"warning: with every span at its longest a rank would need {over:,.1f} GB more than {name} has"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
