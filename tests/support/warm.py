"""`pretrain.py` as a program of its own without the seconds that importing torch and DeepSpeed takes each time.

One fresh interpreter imports them, then forks a process for every rank that is asked for: it gets the environment,
folder, arguments and outputs of a program and runs the file pretrain.py as `__main__`. For runs that are over soon.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.commands import MARK, NONE, PRETRAIN, ROOT, Finished, Variables, environment, marked, world

SERVER = """
import json, os, runpy, sys, traceback
sys.path[0] = os.path.dirname(sys.argv[1])
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as `run_program` does before torch is there
import torch
from megatron_allattn.engine.deepspeed_engine import import_deepspeed
from megatron_allattn.training import main
torch.set_num_threads(1)
import_deepspeed(False)
print("ready", flush=True)

def rank(folder, arguments, environment, out, err):
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((0, os.devnull), (1, out), (2, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    sys.argv[:] = [sys.argv[1], *arguments]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

for line in sys.stdin:
    pids = []
    for one in json.loads(line):
        pids.append(os.fork())
        if pids[-1] == 0:
            code = rank(**one)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
"""


class Warm:
    """The interpreter that forks; see `warm`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def run(self, *arguments: str, folder: Path, ranks: int = 1, variables: Variables = NONE) -> list[Finished]:
        """`python pretrain.py ARGUMENTS` as one process, or as `ranks` that know each other; how each has ended."""
        env = environment(variables) | (world(ranks) if ranks > 1 else {})
        with tempfile.TemporaryDirectory() as outputs:
            paths = [(Path(outputs, f"out{rank}"), Path(outputs, f"err{rank}")) for rank in range(ranks)]
            requests = [
                {
                    "folder": str(folder),
                    "arguments": arguments,
                    "environment": env | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}),
                    "out": str(out),
                    "err": str(err),
                }
                for rank, (out, err) in enumerate(paths)
            ]
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(requests) + "\n")
            self._process.stdin.flush()
            codes = json.loads(self._answer())
            left = marked(env[MARK])
            return [
                Finished(code, out.read_text(), err.read_text(), left)
                for code, (out, err) in zip(codes, paths, strict=True)
            ]


@contextmanager
def warm() -> Iterator[Warm]:
    """Start the interpreter and end it."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, PRETRAIN],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Warm(process)
    finally:
        process.kill()
        process.wait()
