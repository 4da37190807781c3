"""tests/gpu/check.py on the CPU: its numbers, its exit codes, and that it needs nothing but torch and numpy."""

import hashlib
import json
import math
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_allattn.data.corpora import standard_library
from tests.support.template import ROOT

CHECK = "tests/gpu/check.py"
# what a GPU machine need not have: no finder finds it
BLOCKED = ("deepspeed", "tyro", "safetensors", "mpi4py", "tqdm", "matplotlib", "sentencepiece", "triton")
HIDDEN = f"""
import runpy, sys
class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {BLOCKED} else self.finder.find_spec(name, path, target)
    def find_distributions(self, *arguments):
        return getattr(self.finder, "find_distributions", lambda *_: [])(*arguments)
sys.meta_path[:] = map(Hiding, sys.meta_path)
sys.argv = sys.argv[1:]
"""
PROGRAM = f"""{HIDDEN}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
ONLY_RESULTS = f"""{HIDDEN}
sys.path.insert(0, "tests/gpu")
import gpu_parts
gpu_parts.PARTS = (gpu_parts.reference_cases, gpu_parts.attention_backends)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
ONLY_ZERO = """
import runpy, sys
from tests.support.half import allowed
sys.argv = sys.argv[1:]
sys.path.insert(0, "tests/gpu")
import gpu_parts
gpu_parts.PARTS = (gpu_parts.zero,)
with allowed():
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*arguments: object, program: tuple[str, ...] = (CHECK,), root: Path = ROOT) -> tuple[int, str, str]:
    command = [sys.executable, *program, *map(str, arguments)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str]:
    """The report and the printed table of a run without the blocked packages."""
    output = tmp_path_factory.mktemp("check") / "gpu_check.json"
    program = ("-c", PROGRAM, CHECK)
    code, printed, errors = run("--device", "cpu", "--quick", "--output", output, program=program)
    assert (code, errors) == (0, "")
    return json.loads(output.read_text()), printed


def rows(report: dict, beginning: str) -> list[dict]:
    return [row for row in report["rows"] if row["part"].startswith(beginning)]


def test_reference_cases(bare: tuple[dict, str]) -> None:
    statuses = {row["part"].removeprefix("reference "): row["status"] for row in rows(bare[0], "reference")}
    names = ("adaptive_io_tied_adam", "all_attention", "no_span", "transformer_span")
    assert statuses == {f"{name} {dtype}": "passed" for name in names for dtype in ("float64", "float32")}
    for row in rows(bare[0], "reference"):
        adaptive = "adaptive" in row["part"]  # its losses were recorded in float32
        level = (1e-17, 1e-12) if "float64" in row["part"] and not adaptive else (1e-9, 1e-4)
        tokens = "nll" if adaptive else "log_probs"
        assert row["values"]["differences"].keys() == {"losses", tokens, "gradients", "weights"}
        assert all(level[0] < difference < level[1] for difference in row["values"]["differences"].values())


def test_training(bare: tuple[dict, str]) -> None:
    (row,) = rows(bare[0], "training, 40 bfloat16 steps")
    losses = row["values"]["losses"]
    assert row["status"] == "passed"
    assert len(losses) == 40 and all(map(math.isfinite, losses))
    assert abs(losses[0] - math.log(256)) < 0.5  # knows nothing yet
    assert row["values"]["last"] == pytest.approx(sum(losses[-4:]) / 4)
    assert row["values"]["last"] < row["values"]["unigram_entropy_bits"] * math.log(2) < losses[0]
    assert row["values"]["text"] == f"standard library of Python {platform.python_version()}"
    text = b"".join(document.path.read_bytes() for document in standard_library().documents)
    assert 0.85 * len(text) < row["values"]["text_bytes"] < 0.95 * len(text)
    assert row["values"]["text_sha256"] == hashlib.sha256(text[: row["values"]["text_bytes"]]).hexdigest()


def test_first_steps_beside_the_cpus(bare: tuple[dict, str]) -> None:
    found = {row["part"]: row["values"] for row in rows(bare[0], "first steps")}
    assert {part: values["limit"] for part, values in found.items()} == {
        "first steps, float32 | CPU float32": 1e-4,
        "first steps, bfloat16 | CPU bfloat16": 1e-2,
        "first steps, bfloat16 | CPU float32": 1e-2,
    }
    same = [
        values["difference"] for part, values in found.items() if "| CPU float32" not in part or "float32 |" in part
    ]
    assert same == [0.0, 0.0]  # here the device is the CPU: the same bits
    assert 1e-6 < found["first steps, bfloat16 | CPU float32"]["difference"] < 1e-3
    assert all(len(values["losses"]) == len(values["beside"]) == 3 for values in found.values())


def test_a_checkpoint(bare: tuple[dict, str]) -> None:
    (row,) = rows(bare[0], "checkpoint")
    assert (row["status"], row["values"]["difference"]) == ("passed", 0.0)  # here the same bits
    (trained,) = rows(bare[0], "training, 40")
    assert len(row["values"]["losses"]) == 3 and set(row["values"]["losses"]).isdisjoint(trained["values"]["losses"])


def test_attention_backends(bare: tuple[dict, str]) -> None:
    """Those that run on a CPU pass and are timed; triton is left out, with a reason."""
    status = {row["part"].removeprefix("attention "): row["status"] for row in rows(bare[0], "attention ")}
    for name in ("eager", "blocked"):
        found = [status[part] for part in (f"{name}, float32", f"{name}, bfloat16", f"speed, {name}")]
        assert found == ["passed", "passed", "measured"]
    assert {value for part, value in status.items() if "triton" in part} <= {"left out"}


def test_speed_and_what_was_left_out(bare: tuple[dict, str]) -> None:
    report, printed = bare
    for row in rows(report, "speed, "):
        values = row["values"]
        assert row["status"] == "measured"
        assert values["tokens_per_second"] == pytest.approx(values["batch"] * 64 / values["seconds_per_step"])
        assert 2**26 < values["peak_memory_bytes"] < 2**34
    # 2 layers of 64: projections, persistent vectors, norm; embedding, output; positions 8 · 64
    fixed = 2 * (4 * 64 * 64 + 2 * 64 * 64 + 2 * 64) + 2 * 256 * 64 + 256 + 8 * 64
    assert [row["values"]["parameters"] for row in rows(report, "speed")] == [fixed, fixed + 2 * 8]
    (zero,) = rows(report, "DeepSpeed")
    assert (zero["status"], zero["detail"]) == (
        "left out",
        "deepspeed cannot be imported (No module named 'deepspeed')",
    )
    assert [row["status"] for row in rows(report, "apex")] == ["left out"]
    assert report["passed"] is True and report["quick"] is True
    assert report["versions"]["torch"] == torch.__version__
    lines = printed.splitlines()
    assert len(lines) == len(report["rows"]) + 2
    assert all(row["part"] in line for row, line in zip(report["rows"], lines[1:-1], strict=True))
    assert lines[-1].startswith("nothing failed; ")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The report of DeepSpeed's part alone, with float16."""
    pytest.importorskip("deepspeed")
    output = tmp_path_factory.mktemp("check") / "gpu_check.json"
    code, _, errors = run("--device", "cpu", "--quick", "--output", output, program=("-c", ONLY_ZERO, CHECK))
    assert code == 0, errors
    return json.loads(output.read_text())


@pytest.mark.layouts
def test_zero_stages_where_deepspeed_is_installed(full: dict) -> None:
    differences = {row["part"]: row["values"]["difference"] for row in rows(full, "ZeRO") if "|" in row["part"]}
    assert len(differences) == 4 + 4 + 3
    for part, difference in differences.items():
        assert difference < (1e-2 if "float16" in part else 1e-6), part


@pytest.mark.layouts
def test_float16_learns_with_its_loss_scale(full: dict) -> None:
    trainings = [row["values"] for row in rows(full, "ZeRO") if row["part"].endswith("float16, 40 steps")]
    assert len(trainings) == 3
    for found in trainings:
        assert found["fallen"] < 0.7 and len(found["losses"]) == 40
        assert found["loss_scale"] == 2.0 ** (16 - found["skipped"])  # 40 steps are too few to double it


def test_a_wrong_result_fails_the_check(tmp_path: Path) -> None:
    """In a copy of the repository whose span mask is off by two tokens."""
    for folder in ("megatron_allattn", "tests/gpu", "tests/data/reference", "ds_configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    mask = tmp_path / "megatron_allattn/kernels/interface.py"
    text = mask.read_text()
    assert "ramp + 1 - distances" in text
    mask.write_text(text.replace("ramp + 1 - distances", "ramp - 1 - distances"))
    code, printed, _ = run("--device", "cpu", "--quick", program=("-c", ONLY_RESULTS, CHECK), root=tmp_path)
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    failed = [row["part"] for row in report["rows"] if row["status"] == "failed"]
    wrong = [
        f"reference {name} {dtype}"
        for name in ("adaptive_io_tied_adam", "all_attention", "transformer_span")
        for dtype in ("float64", "float32")
    ]
    assert code == 1
    assert report["passed"] is False
    # where the mask ends is known to the blocked backend in another place too, to within a token, so it notices
    assert failed[: len(wrong)] == wrong
    assert {"attention blocked, float32", "attention blocked, bfloat16"} <= set(failed[len(wrong) :])
    assert printed.splitlines()[-1].startswith(f"failed: {', '.join(failed)}; ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (
            ["--device", "cpu", "--output", "/no/such/folder/x.json"],
            "--output /no/such/folder/x.json: its folder does not",
        ),
        (["--fast"], "unrecognized arguments: --fast; see --help"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    code, output, errors = run(*arguments)
    assert (code, output) == (2, "")
    assert errors.startswith(f"error: {message}") and errors.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so() -> None:
    code, output, errors = run()
    assert (code, output) == (2, "")
    assert (
        errors == f"error: --device cuda: torch {torch.__version__} finds no GPU; on a CPU use --device cpu --quick\n"
    )


def test_without_torch_it_says_so() -> None:
    code, output, errors = run(program=("-S", CHECK))
    assert (code, output) == (2, "")
    assert "cannot import torch (No module named 'torch'); name a Python that can: make gpu-check PYTHON=" in errors


def test_the_makefile_runs_it_with_the_machines_own_python() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\ngpu-check:")[2].splitlines()
    assert [line.strip() for line in recipe[:2]] == ["", "$(PYTHON) tests/gpu/check.py"]
