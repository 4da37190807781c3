"""Compare with recorded results of the paper's published code. Exit code 0: all agree, 1: one differs, 2: wrong usage.

    python tools/verify_reference.py tests/data/reference/all_attention.npz
    python tools/verify_reference.py CASE.npz … --tensor-model-parallel-size 4 --dtype float32
    python tools/verify_reference.py curve_200_steps.npz --engine deepspeed --dtype float32

An NPZ case is trained again from its recorded weights; of a .pt case, a checkpoint of the paper's code with a JSON file
beside it, the tokens are scored. The table shows, by quantity, the largest difference and what it may be: relative for
losses and, to a tensor's largest element, for gradients; absolute for log-probabilities, weights and mean spans; losses
of single tokens (nll) relative above 1 nat, absolute below. docs/reference_cases.md describes the files.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works from a checkout that is not installed

from megatron_allattn.config.reporting import refuse, run_program, tell_early_ends, without_interrupts

if __name__ == "__main__":
    tell_early_ends()  # torch is loaded next

import torch
import torch.multiprocessing
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from megatron_allattn.config.errors import UsageError, usage_error
from megatron_allattn.config.tool_flags import ToolParser
from megatron_allattn.inference.recorded import read_recorded, verify_recorded
from megatron_allattn.parallel import discovery
from megatron_allattn.parallel.addresses import RankInfo, free_port
from megatron_allattn.parallel.groups import Groups, close_groups, make_groups, single_process_groups
from megatron_allattn.parallel.layout import Layout
from megatron_allattn.training.reference import CaseReport, verify_case
from megatron_allattn.training.reference_case import Case, read_case

TIMEOUT = 300  # seconds that a rank waits for another


@dataclass(frozen=True)
class Kind:
    """How cases of one kind of file are read (for so many tensor-parallel ranks, normalized so) and replayed.

    `read` raises UsageError for a file that cannot be replayed; `verify` is collective over the tensor group.
    """

    read: Callable[[Path, int, Any], Any]
    verify: Callable[[Any, Groups, torch.device, torch.dtype, str], CaseReport]


def through_plain(case: Case, groups: Groups, device: torch.device, dtype: torch.dtype, backend: str) -> CaseReport:
    """`verify_case` through PyTorch alone."""
    return verify_case(case, groups, device, dtype, backend=backend)


def through_deepspeed(case: Case, groups: Groups, device: torch.device, dtype: torch.dtype, backend: str) -> CaseReport:
    """`verify_case` through DeepSpeed's engine, which is imported for it."""
    from megatron_allattn.engine.deepspeed_engine import DeepSpeedEngine  # noqa: PLC0415

    return verify_case(case, groups, device, dtype, kind=DeepSpeedEngine, backend=backend)


KINDS = {".npz": Kind(read_case, through_plain), ".pt": Kind(read_recorded, verify_recorded)}
ENGINES = {"plain": KINDS, "deepspeed": {".npz": Kind(read_case, through_deepspeed)}}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Flags of the command line. Raises UsageError."""
    parser = ToolParser("verify_reference.py", __doc__)
    parser.add_argument("cases", nargs="+", type=Path, metavar="CASE", help=f"recorded cases ({', '.join(KINDS)})")
    help_text = "local processes (default 1)"
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1, metavar="N", help=help_text)
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--engine", choices=tuple(ENGINES), default="plain")
    parser.add_argument(
        "--attention-backend",
        choices=("eager", "blocked", "cached"),
        default="eager",
        help="(default eager); cached keeps keys and values and cannot train: for .pt cases",
    )
    parser.add_argument(
        "--span-normalization",
        choices=("window", "span"),
        default="window",
        help="window is what was recorded; span leaves its 1e-8 out, with limits that allow for it in most cases",
    )
    return parser.parse_args(argv)


def read(path: Path, size: int, engine: str, normalization: str) -> tuple[Kind, Any]:
    """A case and its kind. Raises UsageError when it is of none or cannot be replayed."""
    kind = ENGINES[engine].get(path.suffix)
    if kind is None:
        rule = f"not a recorded case that the {engine} engine replays"
        raise UsageError(f"{path}: {rule}; their names end in {', '.join(ENGINES[engine])}")
    return kind, kind.read(path, size, normalization)


@dataclass(frozen=True)
class Replay:
    """What is replayed, and how."""

    paths: list[Path]
    size: int
    engine: str
    backend: str
    normalization: str
    device: str
    dtype: torch.dtype


def verify_all(replay: Replay, groups: Groups, device: torch.device) -> list[CaseReport]:
    """The reports of all cases; collective over the tensor group."""
    reports = []
    for path in replay.paths:
        kind, case = read(path, replay.size, replay.engine, replay.normalization)
        reports.append(kind.verify(case, groups, device, replay.dtype, replay.backend))
    return reports


def verify(replay: Replay) -> list[CaseReport]:
    """The reports of all cases, replayed by `size` tensor-parallel processes of this machine."""
    if replay.size == 1 and replay.engine == "plain":
        return verify_all(replay, single_process_groups(), torch.device(replay.device))
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    arguments = (free_port(), os.getpid(), replay, results)
    with without_interrupts():
        ranks = torch.multiprocessing.spawn(_rank, arguments, nprocs=replay.size, join=False, daemon=True)
    while not ranks.join():
        pass
    return results.get()


def _rank(rank: int, port: int, parent: int, replay: Replay, results: Any) -> None:
    """One of the processes; the first puts the reports into `results`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Linux sends it when the parent is gone: end, in a collective too
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if os.getppid() != parent:
        return  # it was gone before that was asked for
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    size = replay.size
    torch.set_num_threads(max(1, torch.get_num_threads() // size))
    info = RankInfo(
        rank=rank,
        world_size=size,
        local_rank=rank,
        local_world_size=size,
        master_addr="127.0.0.1",
        master_port=port,
        source="environment",
    )
    own = torch.device("cuda", rank) if replay.device == "cuda" else torch.device(replay.device)
    discovery.initialize(info, TIMEOUT, own)
    groups = make_groups(Layout(tensor_size=size), timedelta(seconds=TIMEOUT))
    reports = verify_all(replay, groups, own)
    if rank == 0:
        results.put(reports)
    close_groups()


def check_devices(size: int, device: str) -> None:
    """UsageError unless there is a device for every process."""
    if size < 1:
        raise usage_error("--tensor-model-parallel-size", size, "must be at least 1", "give the number of processes")
    if device == "cuda" and torch.cuda.device_count() < size:
        rule = f"{size} GPU(s) are needed, torch {torch.__version__} finds {torch.cuda.device_count()}"
        raise usage_error("--device", device, rule, "use --device cpu")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        size = options.tensor_model_parallel_size
        check_devices(size, options.device)
        if options.engine == "deepspeed" and options.dtype == "float64":
            raise usage_error("--dtype", "float64", "DeepSpeed trains in float32 at most", "add --dtype float32")
        for path in options.cases:
            if options.attention_backend == "cached" and path.suffix != ".pt":
                rule = f"keeps keys and values of fixed weights, and {path} is a training"
                raise usage_error("--attention-backend", "cached", rule, "give .pt cases, or another backend")
            read(path, size, options.engine, options.span_normalization)
    except UsageError as error:
        return refuse(error)
    what = f"{options.dtype} on {options.device}, tensor-parallel size {size}, {options.engine} engine"
    print(f"{what}, {options.attention_backend} attention over the {options.span_normalization}", flush=True)
    dtype = getattr(torch, options.dtype)
    replay = Replay(
        paths=options.cases,
        size=size,
        engine=options.engine,
        backend=options.attention_backend,
        normalization=options.span_normalization,
        device=options.device,
        dtype=dtype,
    )
    try:
        reports = verify(replay)
    except (ProcessExitedException, ProcessRaisedException) as error:
        print(f"error: {str(error).strip()}", file=sys.stderr)
        return 1
    print("\n".join(report.line() for report in reports))
    return 0 if all(report.passed for report in reports) else 1


if __name__ == "__main__":
    run_program(main)
