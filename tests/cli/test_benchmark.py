"""tools/benchmark.py: help, mistakes in one line, tiny runs of every command, and what they need to be installed."""

import importlib.util
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.commands import ROOT
from tests.support.documentation import commands

TOOL = "tools/benchmark.py"
TINY = ["--recipe", "demo", "--num-layers", "2", "--runs", "1", "--warmup", "0", "--threads", "1", "--device", "cpu"]

# what a machine that only measures kernels need not have: no finder finds it
BARE = """
import atexit, runpy, sys
HIDDEN = ("deepspeed", "tyro", "safetensors", "mpi4py", "tqdm", "matplotlib", "sentencepiece", "pydantic", "einops")
class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)
    def find_distributions(self, *arguments):
        return getattr(self.finder, "find_distributions", lambda *_: [])(*arguments)
sys.meta_path[:] = map(Hiding, sys.meta_path)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def tool() -> Any:
    """The tool's functions."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / TOOL)))


@pytest.fixture(autouse=True)
def _threads_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tool sets the threads of its process, which here is that of all tests."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def program(*arguments: object, through: tuple[str, ...] = (TOOL,)) -> tuple[int, str, str]:
    command = [sys.executable, *through, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            [],
            "command '': there is no such benchmark; "
            "give one of attention, layer, step, generate, data, save, plan-check first",
        ),
        (["steps"], "command steps: there is no such benchmark; did you mean step?"),
        (["--recipe", "demo"], "command --recipe: there is no such benchmark; give one of"),
        (["step", "--recip", "demo"], "flag --recip: is unknown; did you mean --recipe?"),
        (["step", "--runs", "1", "--runs", "2"], "flag --runs: is given twice; give it once"),
        (["step", "--threads", "9999"], "argument --threads: 9999: this process may use "),
        (["step", "--runs", "0"], "argument --runs: '0': must be an integer from 1 to 2147483647; see --help"),
        (["step", "--warmup", "-1"], "argument --warmup: '-1': must be an integer from 0 to 2147483647; see --help"),
        (["step", "--dropout", "1"], "argument --attention-dropout/--dropout: '1': must be a number from 0 up to, and"),
        (["step", "--dtype", "float16"], "argument --dtype: invalid choice: 'float16'"),
        (
            ["step", "--json", "/no/such/folder/x.json"],
            "--json /no/such/folder/x.json: the folder /no/such/folder does not exist",
        ),
        (["step", "--recipe", "enwik8"], "--recipe enwik8: unknown recipe; did you mean enwik8-"),
        (["step", "--span-profile", "latest"], "--span-profile latest: cannot be read (No such file or directory)"),
        ([*("step", *TINY), "--compare", "float32"], "--compare float32: blocked, float32 is there already; leave it"),
        (["attention", "--plot", "a.svg"], "--plot a.svg: there is nothing to draw; add --sweep mean-span max-span"),
        (["attention", "--points", "3"], "--points 3: has no effect without its sweep; add --sweep mean-span max-span"),
        (["attention", "--longest-span", "99"], "--longest-span 99: has no effect without its sweep"),
        (["attention", "--sweep", "mean-span", "--mean-span", "9"], "--mean-span 9: has no effect without its sweep"),
        (["attention", "--points", "2"], "argument --points: '2': must be an integer from 3 to"),
        (["attention", *TINY, "--sweep", "mean-span"], "--longest-span 2048: the maximum span of demo is 256"),
        (
            ["attention", *TINY, "--sweep", "max-span", "--longest-span", "200", "--mean-span", "50"],
            "--mean-span 50: with 4 heads, one of them at 200, it is in 74 … 193",
        ),
        (
            ["attention", *TINY, "--sweep", "max-span", "--longest-span", "10"],
            "--longest-span 10: with 4 heads, a ramp of 32 and 7 points it is at least 42; give a longer span or fewer",
        ),
        (
            ["attention", *TINY, "--sweep", "max-span", "--longest-span", "200"],
            "--longest-span 200: with 4 heads, one of them at it, the mean is in 74 … 193, and it is 300 by default;",
        ),
        (["attention", "--recipe", "enwik8-transformer-small-fixed-span"], "--recipe enwik8-transformer-small-fixed-"),
        (["layer", "--recipe", "text8-large-n0"], "--recipe text8-large-n0: its layers are not all-attention with"),
        (["data", "--input", "/no/such/file"], "--input /no/such/file: no such file; give text files"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    tool: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(arguments) == 2
    printed, errors = capsys.readouterr()
    last = errors.splitlines()[-1]
    assert printed == "" and last.startswith(f"error: {message}")
    assert sum(not line.startswith("note: ") for line in errors.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["attention", "--device", "cuda", "--check"]) == 2
    assert (
        capsys.readouterr().err == f"error: --device cuda: torch {torch.__version__} finds no GPU; use --device cpu\n"
    )


def test_a_peer_that_is_missing(tool: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert tool.main(["layer", *TINY, "--peers", "x-transformers"]) == 2
    why = "x-transformers is not installed (pip install x-transformers)"
    assert capsys.readouterr().err.endswith(f"error: --peers x-transformers: {why}; install it or leave it out\n")


def test_help_is_answered_without_torch() -> None:
    watched = "import runpy, sys, atexit\nsys.argv = sys.argv[1:]\n"
    watched += (
        "atexit.register(lambda: print('torch' in sys.modules))\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    )
    code, printed, _ = program("--help", through=("-c", watched, TOOL))
    assert code == 0 and printed.startswith("Speed and memory") and printed.endswith("False\n")
    code, printed, _ = program("step", "--help", through=("-c", watched, TOOL))
    assert code == 0 and printed.startswith("usage: benchmark.py step") and printed.endswith("False\n")


def test_attention_with_its_check_needs_torch_and_numpy_alone(tmp_path: Path) -> None:
    output = tmp_path / "attention.json"
    arguments = ("attention", *TINY, "--check", "--attention-backend", "blocked", "eager", "--json", output)
    code, printed, _ = program(*arguments, through=("-c", BARE, TOOL))
    assert code == 0
    found = json.loads(output.read_text())
    assert found["benchmark"] == "attention" and list(found["results"]) == ["blocked", "eager"]
    checked = {row["part"]: row["status"] for row in found["check"]}
    assert checked["attention blocked, float32"] == checked["attention eager, bfloat16"] == "passed"
    assert found["settings"]["notes"] and "| blocked" in printed


def test_layer_needs_torch_and_numpy_alone(tmp_path: Path) -> None:
    output = tmp_path / "layer.json"
    code, _, _ = program("layer", *TINY, "--json", output, through=("-c", BARE, TOOL))
    assert code == 0
    assert set(json.loads(output.read_text())["results"]) >= {
        "all-attention (blocked)",
        "standard",
        "all-attention (eager)",
    }


def test_sweeps_and_their_plot(tool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    plot, output = tmp_path / "cost.svg", tmp_path / "sweep.json"
    sweeps = ["--sweep", "mean-span", "max-span", "--longest-span", "200", "--mean-span", "90", "--points", "3"]
    assert tool.main(["attention", *TINY, *sweeps, "--plot", str(plot), "--json", str(output)]) == 0
    found = json.loads(output.read_text())["sweeps"]
    assert found["mean-span"]["blocked"]["x"] == [74, 87, 100]
    assert found["max-span"]["blocked"]["x"] == [90, 145, 200]
    printed = capsys.readouterr().out
    assert f"R² {found['mean-span']['blocked']['r_squared']:.4f}" in printed
    assert f"flat within {100 * found['max-span']['blocked']['flatness']:.1f} %" in printed
    assert plot.read_text().count("blocked: ") == 2


def test_a_step_writes_its_numbers(tool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "step.json"
    arguments = ["--micro-batch-size", "2", "--span-profile", "late", "--compare", "eager", "--json", str(output)]
    assert tool.main(["step", *TINY, *arguments]) == 0
    found = json.loads(output.read_text())
    numbers = ("tokens_per_second", "peak_memory_gb", "gemm_gflops", "share", "tokens_per_second_per_gemm_gflops")
    assert all(found[name] > 0 for name in numbers)
    assert (found["name"], list(found["compared"])) == ("blocked, float32", ["eager, float32"])
    for one in (found, *found["compared"].values()):
        assert 0.1 < one["peak_memory_gb"] < 1.5
        assert one["tokens_per_second_runs"]["runs"] == 1
        assert one["gemm_gflops"] == found["rates"]["float32"]["median"]
    assert found["rates"].keys() == {"float32", "bfloat16", "copy"}
    settings = found["settings"]
    assert (settings["recipe"], settings["micro_batch_size"], settings["runs"]) == ("demo", 2, 1)
    assert found["machine"]["threads"] == 1
    assert "eager, float32" in capsys.readouterr().out


def test_generation_and_data(tool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, text = tmp_path / "found.json", tmp_path / "text"
    assert tool.main(["generate", *TINY, "--positions", "9", "70", "--tokens", "2", "--json", str(output)]) == 0
    assert list(json.loads(output.read_text())["seconds_per_token"]) == ["9", "70"]
    text.write_text("one two two three\n" * 500)
    small = ["--megabytes", "1", "--runs", "1", "--warmup", "0", "--global-batch-size", "4", "--seq-length", "64"]
    assert tool.main(["data", *small, "--input", str(text), "--json", str(output)]) == 0
    assert json.loads(output.read_text())["settings"]["text_mb"] == 0.009
    assert "| prepare, word" in capsys.readouterr().out


def test_a_prediction_beside_this_machine(tool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "found.json"
    assert tool.main(["plan-check", *TINY, "--json", str(output)]) == 0
    table = capsys.readouterr().out
    (memory,) = (line.split("|") for line in table.splitlines() if line.startswith("| memory, GB"))
    assert float(memory[4]) == pytest.approx(1.0, abs=0.1)
    assert output.exists()


def test_the_documentation_has_every_command() -> None:
    """docs/performance.md; that its lines parse is tests/test_documentation.py's to say."""
    lines = commands((ROOT / "docs/performance.md").read_text())
    named = {line.text.split()[2] for line in lines if line.text.startswith(f"python {TOOL}")}
    assert named == {"attention", "layer", "step", "generate", "data", "save", "plan-check"}
