"""What became of a run, from what its ranks say of themselves: one message that names the ranks and their groups.

Pure functions of reports, stack frames and groups; failures.py brings the reports together.
"""

import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Literal

import torch.distributed as dist

from megatron_allattn.parallel.collectives import PeerFailed
from megatron_allattn.parallel.groups import Group, Groups

_COLLECTIVES = dist.distributed_c10d.__file__
_GLOO = re.compile(r"\[[^]]*\.cc:\d+\]")
"""How gloo begins what it says; it raises plain RuntimeErrors, as other code does."""

_LOST = re.compile(
    "Connection closed by peer|Connection reset|Broken pipe|Application timeout caused pair closure"  # gloo
    "|ncclRemoteError|remote process exited|[Ss]ocket.*(closed|reset|refused)"  # NCCL
)
_LATE = re.compile("Timed out waiting|[Tt]imeout", re.IGNORECASE)

Kind = Literal["error", "ended", "stuck", "lost", "late", "there", "done"]


@dataclass(frozen=True)
class Report:
    """What a rank says of itself once any rank has failed.

    kind: an error of its own; `ended` by a signal, which `message` names first; `stuck` in a section that took too
    long, which it says; a collective that failed since the connection was lost, or since the
    others did not come in time; `there`: nothing of that, it waits or computes; `done`: it has ended well.
    where: the group in which it waited, or the line at which it was.
    """

    kind: Kind
    where: str = ""
    message: str = ""
    exit_code: int = 1


def kind_of(error: BaseException) -> Kind:
    """Whose failure an exception tells of: `error` is this rank's own, anything else comes from another's."""
    if isinstance(error, PeerFailed):
        return "there"
    message = str(error)
    if isinstance(error, dist.DistError) or (type(error) is RuntimeError and _GLOO.search(message)):
        if _LOST.search(message):
            return "lost"
        if _LATE.search(message):
            return "late"
    return "error"


def verdict(reports: Mapping[int, Report], world_size: int, seconds: float) -> str:
    """The message. reports: by rank, of those that have answered; seconds: the time-out of collectives.

    A rank's own error explains everything else; then ranks that are gone; then SIGTERM; then who waited where.
    """
    errors = [rank for rank, report in reports.items() if report.kind == "error"]
    if errors:
        return reports[min(errors)].message
    details = told(reports, seconds)
    gone = [rank for rank in range(world_size) if rank not in reports]
    if gone:
        return f"{name_ranks(gone)} {'is' if len(gone) == 1 else 'are'} gone: {details}"
    kinds = {report.kind for report in reports.values()}
    if "ended" in kinds:
        name = next(report.message for report in reports.values() if report.kind == "ended").split()[0]
        return f"the run was ended by {name}: {details}"
    if "stuck" in kinds:
        return f"the run did not get on: {details}"
    if "late" in kinds:
        return f"the ranks waited for each other in vain: {details}"
    if "done" in kinds:
        return f"some ranks ended before the others: {details}"
    return f"a connection was lost, but no rank is gone: {details}"


def name_ranks(ranks: Iterable[int], word: str = "and") -> str:
    """`rank 3`, `ranks 1 and 2`, `ranks 0, 1 and 2`; another word: `rank 1 or 2`."""
    names = [str(rank) for rank in sorted(ranks)]
    several = "ranks" if word == "and" else "rank"
    return f"rank {names[0]}" if len(names) == 1 else f"{several} {', '.join(names[:-1])} {word} {names[-1]}"


def told(reports: Mapping[int, Report], seconds: float) -> str:
    """What the ranks say, those that say the same together, and what explains most first: who was elsewhere comes
    before who waited for it."""
    words = {
        "ended": "got",
        "stuck": "had been",
        "lost": "lost the connection",
        "late": f"gave up after {seconds:g} s",
        "there": "waited",
        "done": "ended",
    }
    same: dict[tuple[int, bool, str], list[int]] = {}
    for rank, report in sorted(reports.items()):
        waits = not (report.kind in ("there", "stuck") and report.where.startswith("at "))
        if report.kind == "ended":
            what = f"got {report.message}"
        elif report.kind == "stuck":
            what = f"had been {report.message}, and {'waited' if waits else 'was'}"
        else:
            what = words[report.kind] if waits else "was"
        does = f"{what} {report.where}".strip()
        same.setdefault((list(words).index(report.kind), waits, does), []).append(rank)
    return "; ".join(f"{name_ranks(ranks)} {does}" for (*_, does), ranks in sorted(same.items()))


def place(groups: Groups, rank: int) -> str:
    """Where a rank stands: `stage 2 of the pipeline group [1, 3], tensor group [2, 3]`, and the data group likewise."""
    layout, parts = groups.layout, []
    if layout.pipeline_size > 1:
        parts.append(f"stage {layout.pipeline_rank(rank) + 1} of the pipeline group {layout.pipeline_group(rank)}")
    if layout.tensor_size > 1:
        parts.append(f"tensor group {layout.tensor_group(rank)}")
    if layout.data_size > 1:
        parts.append(f"data group {layout.data_group(rank)}")
    return ", ".join(parts)


def where_raised(error: BaseException, groups: Groups) -> str:
    """The group in which the collective that raised was to take place, or else the line that raised."""
    frames, traceback = [], error.__traceback__
    while isinstance(traceback, TracebackType):
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    frames.reverse()
    return _waiting(frames, groups) or _line(frames[0], groups)


def where_now(groups: Groups, thread: int, *, alone: bool = False) -> str:
    """The group in which this process waits, on whichever thread (backward has its own on a GPU; on `thread` itself if
    that works `alone`), or else the line at which `thread` is."""
    stacks = {key: list(_outwards(frame)) for key, frame in sys._current_frames().items()}
    own = stacks.get(thread, [])
    waiting = (_waiting(stack, groups) for stack in ([own] if alone else stacks.values()))
    found = next((found for found in waiting if found), None)
    return found or (_line(own[0], groups) if own else "at its end")


def _outwards(frame: FrameType | None) -> Iterable[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _waiting(frames: list[FrameType], groups: Groups) -> str | None:
    """The group of the innermost collective of a stack, ours or DeepSpeed's: all go through these functions."""
    for frame in frames:
        if frame.f_code.co_filename == _COLLECTIVES and "group" in frame.f_locals:
            peer = frame.f_locals.get("dst", frame.f_locals.get("src")) if "tensor" in frame.f_locals else None
            single = frame.f_code.co_name in ("send", "recv", "isend", "irecv")
            return _group(frame.f_locals["group"], peer if single else None, groups)
    return None


def _group(handle: Any, peer: int | None, groups: Groups) -> str:
    if peer is not None and peer in groups.pipeline.ranks:  # DeepSpeed sends between stages in the world's group
        return f"in the pipeline group {list(groups.pipeline.ranks)}, for rank {peer}"
    ranks = dist.get_process_group_ranks(handle)
    named: dict[str, Group] = {
        "tensor": groups.tensor,
        "data": groups.data,
        "pipeline": groups.pipeline,
        "ends": groups.ends,
        "world": groups.world,
        "saving": groups.saving,
    }
    same = [name for name, group in named.items() if handle is not None and group.handle is handle]
    same += [name for name, group in named.items() if list(group.ranks) == ranks]  # one of DeepSpeed's own
    return f"in {f'the {same[0]} group' if same else 'a group'} {ranks}"


def _line(frame: FrameType, groups: Groups) -> str:
    """The line. ZeRO waits for collectives that it has begun earlier, and all of those are over the replicas."""
    path = frame.f_code.co_filename
    line = f"at {os.path.join(*path.split(os.sep)[-2:])}:{frame.f_lineno} ({frame.f_code.co_name})"
    zero = "deepspeed" in path.split(os.sep) and groups.data.size > 1
    return f"{line}, where DeepSpeed works for the data group {list(groups.data.ranks)}" if zero else line
