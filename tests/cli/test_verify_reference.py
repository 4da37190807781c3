"""tools/verify_reference.py: exit codes, its table, one line for a mistake, and no process left behind."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import ROOT

TOOL = ROOT / "tools/verify_reference.py"
CASES = ROOT / "tests/data/reference"
REPLAYED = ["all_attention", "no_span", "transformer_span", "adaptive_io_tied_adam"]
LINE = (
    r"ok   (\w+): losses (\S+) \(≤ 1e-\d+\), (?:log_probs|nll) (\S+) .*, gradients (\S+) .*, weights (\S+) \(≤ 1e-\d+\)"
)
# runs the tool as a program, then tells its exit code and which of these packages it had loaded by its end
WATCHED = """
import atexit, runpy, sys
sys.argv = sys.argv[1:]
unwanted = ("deepspeed", "tyro", "safetensors", "mpi4py", "sentencepiece")
atexit.register(lambda: print("loaded", [name for name in unwanted if name in sys.modules]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*arguments: object, program: tuple[str, ...] = (str(TOOL),)) -> tuple[int, str, str]:
    command = [sys.executable, *program, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`run` in this process, where no others take part: (exit code, output, errors)."""
    main = runpy.run_path(str(TOOL))["main"]

    def answer(*arguments: object) -> tuple[int, str, str]:
        try:
            code = main(list(map(str, arguments)))
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return answer


def case(name: str) -> Path:
    return CASES / f"{name}.npz"


def check_table(output: str, size: int, backend: str, names: list[str] = REPLAYED) -> None:
    heading, *lines = output.splitlines()
    assert heading == (
        f"float64 on cpu, tensor-parallel size {size}, plain engine, {backend} attention over the window"
    )
    for line, name in zip(lines, names, strict=True):
        match = re.fullmatch(LINE, line)
        assert match is not None, line
        assert match[1] == name
        bound = 1e-5 if name.startswith("adaptive") else 1e-12  # the former's losses were recorded in float32
        assert all(0 < float(difference) < bound for difference in match.groups()[1:])


def test_recorded_cases_agree_and_nothing_but_torch_and_numpy_is_needed() -> None:
    code, output, errors = run(*map(case, REPLAYED), program=("-c", WATCHED, str(TOOL)))
    assert (code, errors) == (0, "")
    *table, last = output.splitlines()
    check_table("\n".join(table), 1, "eager")
    assert last == "loaded []"


@pytest.mark.layouts
def test_recorded_cases_agree_with_another_backend_over_local_processes() -> None:
    checkpoints = [CASES / "adaptive_span_char.pt", CASES / "adaptive_span_word.pt"]
    flags = ("--tensor-model-parallel-size", 2, "--attention-backend", "blocked")
    names = REPLAYED[:2]
    code, output, errors = run(*map(case, names), *checkpoints, *flags)
    assert (code, errors) == (0, "")
    *table, char, word = output.splitlines()
    check_table("\n".join(table), 2, "blocked", names)
    assert char.startswith("ok   adaptive_span_char: mean_nll ") and "greedy 0.0e+00" in char
    assert word.startswith("ok   adaptive_span_word: mean_nll ")


def test_the_normalization_over_spans_differs_from_what_was_recorded(answer) -> None:
    """Within limits that allow for its missing 1e-8, in two cases beyond them."""
    flags = ("--span-normalization", "span", "--attention-backend", "blocked")
    code, output, errors = answer(*map(case, REPLAYED), *flags)
    assert (code, errors) == (1, "")
    heading, *lines = output.splitlines()
    assert heading == "float64 on cpu, tensor-parallel size 1, plain engine, blocked attention over the span"
    assert [line.partition(":")[0] for line in lines] == [
        "ok   all_attention",
        "ok   no_span",
        "FAIL transformer_span",
        "FAIL adaptive_io_tied_adam",
    ]
    assert "weights 1.5e-05 (≤ 1e-05)" in lines[2]
    assert "gradients 2.4e-04 (≤ 1e-05)" in lines[3]


@pytest.mark.layouts
def test_a_case_through_deepspeed() -> None:
    code, output, errors = run(case("all_attention"), "--engine", "deepspeed", "--dtype", "float32")
    assert (code, errors) == (0, "")
    heading, line = output.splitlines()
    assert heading == "float32 on cpu, tensor-parallel size 1, deepspeed engine, eager attention over the window"
    assert line.startswith("ok   all_attention: losses ")


def test_a_case_that_differs_is_exit_code_1(tmp_path: Path, answer) -> None:
    with np.load(case("all_attention")) as archive:
        arrays = {name: archive[name] for name in archive.files}
    arrays["config"] = np.array(json.dumps({**json.loads(str(arrays["config"])), "ramp": 7}))
    np.savez(tmp_path / "other_ramp.npz", **arrays)
    code, output, errors = answer(tmp_path / "other_ramp.npz", case("no_span"), "--dtype", "float32")
    assert (code, errors) == (1, "")
    assert [line[:17] for line in output.splitlines()] == [
        "float32 on cpu, t",
        "FAIL other_ramp: ",
        "ok   no_span: los",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: CASE; see --help"),
        (
            [case("no_span"), "/no/such.npz"],
            "/no/such.npz: not a reference case (No such file or directory); give a case as docs/reference_cases.md",
        ),
        ([TOOL], f"{TOOL}: not a recorded case that the plain engine replays; their names end in .npz, .pt"),
        (
            [case("no_span"), "--tensor-model-parallel-size", "3"],
            f"{case('no_span')}: --tensor-model-parallel-size 3: must",
        ),
        (
            [case("no_span"), "--tensor-model-parallel-size", "0"],
            "--tensor-model-parallel-size 0: must be at least 1; give",
        ),
        (
            [case("no_span"), "--tensor-model-parallel-size", "two"],
            "argument --tensor-model-parallel-size: invalid int",
        ),
        ([case("no_span"), "--dtype", "bfloat16"], "argument --dtype: invalid choice: 'bfloat16'"),
        ([case("no_span"), "--dtype", "float32", "--dtype", "float64"], "flag --dtype: is given twice; give it once"),
        (
            [case("no_span"), "--attention-backend", "cached"],
            f"--attention-backend cached: keeps keys and values of fixed weights, and {case('no_span')} is a training",
        ),
        ([case("no_span"), "--engine", "deepspeed"], "--dtype float64: DeepSpeed trains in float32 at most; add"),
        (
            [CASES / "adaptive_span_char.pt", "--engine", "deepspeed", "--dtype", "float32"],
            f"{CASES / 'adaptive_span_char.pt'}: not a recorded case that the deepspeed engine replays; their",
        ),
        ([case("no_span"), "--attention-backend", "fast"], "argument --attention-backend: invalid choice: 'fast'"),
        (
            [case("no_span"), "--attention-backend", "eager", "--attention-backend", "blocked"],
            "flag --attention-backend: is given twice; give it once",
        ),
        ([case("no_span"), "--span-normalization", "no"], "argument --span-normalization: invalid choice: 'no'"),
        ([case("no_span"), "--dtyp", "float32"], "flag --dtyp: is unknown; did you mean --dtype?"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[object], message: str, answer) -> None:
    code, output, errors = answer(*arguments)
    assert (code, output) == (2, "")
    assert errors.startswith(f"error: {message}")
    assert errors.count("\n") == 1


def descendants(pid: int) -> dict[int, str]:
    """Command lines of all processes below `pid`, by pid."""
    parents, commands = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                commands[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, IndexError):
                continue  # it has ended meanwhile
    found: set[int] = set()
    while new := {child for child, parent in parents.items() if parent in found | {pid}} - found:
        found |= new
    return {child: commands[child] for child in found if child in commands}


def wait_until(condition, seconds: float = 90):
    """The first true value of `condition()`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return value


@pytest.fixture
def running():
    """The tool at work on a long list of cases over two processes, and all its descendants' pids."""
    command = [sys.executable, str(TOOL), *[str(case("no_span"))] * 80, "--tensor-model-parallel-size", "2"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ranks: list[int] = []
    try:

        def both() -> list[int]:
            return [pid for pid, command in descendants(process.pid).items() if "spawn_main" in command]

        ranks = wait_until(lambda: both() if len(both()) == 2 else None)
        wait_until(lambda: all(_loaded_torch(pid) for pid in ranks))
        yield process, ranks, list(descendants(process.pid))
    finally:
        process.kill()
        for pid in filter(alive, ranks):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def _loaded_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
@pytest.mark.faults
def test_a_process_that_dies_ends_them_all(running) -> None:
    process, ranks, everyone = running
    os.kill(ranks[1], signal.SIGKILL)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert re.search(r"error: process [01] terminated with signal SIGKILL|Connection closed by peer", errors)
    assert "ok" not in output
    wait_until(lambda: not any(map(alive, everyone)), 30)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")
@pytest.mark.faults
def test_processes_end_when_the_program_is_killed(running) -> None:
    process, _, everyone = running
    process.kill()
    process.communicate()
    wait_until(lambda: not any(map(alive, everyone)), 30)
