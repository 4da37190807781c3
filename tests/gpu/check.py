"""Whether this machine's GPU computes what it should, and how fast: `make gpu-check`.

    python tests/gpu/check.py [--device cuda|cpu] [--quick] [--output gpu_check.json]

Runs with the Python (3.11 or newer), torch and numpy it finds: no environment, no network, no installation. Parts that
need more are left out with the reason. Prints a table and writes a JSON file. Exit code 0: nothing failed, 1: something
did, 2: it cannot run here.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]  # the repository, installed or not, and the parts beside this file


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"error: {message}; see --help\n")


def parse(argv):
    """The command line."""
    parser = _OneLineParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, under a minute on a CPU")
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"), metavar="FILE", help="JSON to write")
    return parser.parse_args(argv)


def obstacle(options):
    """Why the check cannot run here, in one line, or None."""
    if sys.version_info < (3, 11):  # noqa: UP036 (it runs with any Python it is started with)
        return f"Python {platform.python_version()}: 3.11 or newer is needed; make gpu-check PYTHON=python3.11"
    for name in ("torch", "numpy"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"{sys.executable} cannot import {name} ({error}); name a Python that can: make gpu-check PYTHON=…"
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        return f"--device cuda: torch {torch.__version__} finds no GPU; on a CPU use --device cpu --quick"
    if not options.output.resolve().parent.is_dir():
        return f"--output {options.output}: its folder does not exist; make it first"
    return None


def describe(device):
    """What the check ran on."""
    import torch

    from megatron_allattn.kernels.fused import apex_kind

    on_gpu = device.type == "cuda"
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("numpy", "deepspeed", "triton"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    versions["apex"] = apex_kind()
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU ({os.cpu_count()} cores)",
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if on_gpu else None,
        "cuda": torch.version.cuda,
        "versions": versions,
    }


def run(device, sizes):
    """The rows of all parts, printed as they come; a part that breaks is a row that failed."""
    from gpu_parts import PARTS, Row

    rows = []
    for part in PARTS:
        try:
            for row in part(device, sizes):
                print(f"{row.status:8}  {row.part:38}  {row.detail}", flush=True)
                rows.append(row)
        except Exception as error:
            traceback.print_exc()
            rows.append(Row(part.__name__, "failed", f"{type(error).__name__}: {error}".splitlines()[0]))
            print(f"{rows[-1].status:8}  {rows[-1].part:38}  {rows[-1].detail}", flush=True)
    return rows


def main(argv=None):
    options = parse(argv)
    if (why := obstacle(options)) is not None:
        print(f"error: {why}", file=sys.stderr)
        return 2
    import torch
    from gpu_parts import FULL, QUICK

    torch.set_float32_matmul_precision("highest")  # some images allow TF32 by default
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    start = time.perf_counter()
    about = describe(device)
    versions = about["versions"]
    print(f"{about['device']}: " + ", ".join(f"{name} {version}" for name, version in versions.items()), flush=True)
    rows = run(device, QUICK if options.quick else FULL)
    failed = [row.part for row in rows if row.status == "failed"]
    seconds = time.perf_counter() - start
    report = {
        "passed": not failed,
        "quick": options.quick,
        "seconds": seconds,
        **about,
        "rows": [vars(r) for r in rows],
    }
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    verdict = f"failed: {', '.join(failed)}" if failed else "nothing failed"
    print(f"{verdict}; {seconds:.0f} s; written to {options.output}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
