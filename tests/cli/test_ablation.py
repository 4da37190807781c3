"""tools/ablation.py with a stand-in for pretrain.py: what is run, interrupted, refused and collected."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import corpus
from tests.support.template import ROOT
from tests.support.tools import Tool, in_process

TOOL = ROOT / "tools" / "ablation.py"
STAND_IN = """
import json, signal, sys, time
from pathlib import Path
flags = dict(zip(sys.argv[2::2], sys.argv[3::2]))
save = Path(flags["--save"])
save.mkdir(parents=True, exist_ok=True)
with open(save.parent / "started", "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
mode = (save.parent / "mode").read_text().split() if (save.parent / "mode").exists() else []
def end(outcome, code):
    (save / "outcome.json").write_text(json.dumps({"outcome": outcome, "step": 1, "reason": ""}))
    sys.exit(code)
if save.name in mode[1:] and mode[0] == "refuse":
    print("error: --lr 0: must be above 0", file=sys.stderr)
    sys.exit(2)
if save.name in mode[1:] and mode[0] == "fail":
    end("failed", 1)
if save.name in mode[1:] and mode[0] == "wait":
    signal.signal(signal.SIGTERM, lambda *_: end("stopped", 3))
    time.sleep(60)
loss = 2.0 + 0.01 * int(flags["--seed"]) + 0.1 * (flags.get("--variant", "all-attn") != "all-attn")
record = {"kind": "valid", "step": 1, "loss": loss, "bpc": loss}
(save / "metrics.jsonl").write_text(json.dumps(record) + "\\n")
end("done", 0)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpus(tmp_path_factory.mktemp("data"), num_words=400)


@pytest.fixture
def arguments(tmp_path: Path, data: Path) -> list[str]:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    return [
        *("--output", str(tmp_path / "out"), "--launch", f"{sys.executable} {tmp_path / 'stand_in.py'}"),
        *("--variants", "attn-split", "--sizes", "0", "--seeds", "2", "--data-path", str(data)),
    ]


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Tool:
    return in_process(TOOL, capsys)


def mode(tmp_path: Path, *words: str) -> None:
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out/mode").write_text(" ".join(words))


def started(tmp_path: Path) -> list[str]:
    """The runs that were begun, by name."""
    lines = (tmp_path / "out/started").read_text().splitlines()
    return [Path(line.split(" --save ")[1].split()[0]).name for line in lines]


def test_all_runs_then_only_what_is_left(tool: Tool, tmp_path: Path, arguments: list[str]) -> None:
    mode(tmp_path, "fail", "attn-split-seed1")
    code, output, errors = tool(*arguments)
    every = [f"{name}-seed{seed}" for seed in (1, 2) for name in ("all-attn", "attn-split", "n0")]
    assert code == 1 and started(tmp_path) == every
    assert errors == f"error: attn-split-seed1 failed; {tmp_path / 'out/attn-split-seed1'}.log says why\n"
    first = (tmp_path / "out/started").read_text().splitlines()
    folder = tmp_path / "out/n0-seed2"
    assert first[0].split()[0] == str(ROOT / "pretrain.py")
    assert first[5].endswith(f"--persistent-memory-size 0 --seed 2 --save {folder} --load {folder}")
    assert "5 of 6 runs are done" in output
    mode(tmp_path, "none")
    code, output, errors = tool(*arguments)
    assert (code, errors) == (0, "") and started(tmp_path) == [*every, "attn-split-seed1"]
    assert "| attn-split | " in (tmp_path / "out/results.md").read_text()
    assert "better than attn-split | +0.1000 ± 0.0071: seen |" in (tmp_path / "out/results.md").read_text()
    assert len(json.loads((tmp_path / "out/results.json").read_text())) == 6
    assert (tmp_path / "out/figure.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "out/figure.png").unlink()
    assert tool(*arguments, "--show")[0] == 0 and len(started(tmp_path)) == 7
    assert (tmp_path / "out/figure.png").exists()


def test_what_pretrain_refuses_ends_the_sweep(tool: Tool, tmp_path: Path, arguments: list[str]) -> None:
    mode(tmp_path, "refuse", "attn-split-seed1")
    code, _, errors = tool(*arguments)
    assert (code, errors) == (2, "error: --lr 0: must be above 0\n")
    assert started(tmp_path) == ["all-attn-seed1", "attn-split-seed1"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_lets_its_run_save(tmp_path: Path, arguments: list[str], number: int) -> None:
    mode(tmp_path, "wait", "attn-split-seed1")
    command = [sys.executable, str(TOOL), *arguments]
    sweep = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "out/started").exists() or len(started(tmp_path)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.3)  # until it would wait for SIGTERM
        os.kill(sweep.pid, number)
        _, errors = sweep.communicate(timeout=30)
    finally:
        sweep.kill()
    assert (sweep.returncode, errors) == (3, "stopped: the run under way has saved; the same command goes on\n")
    outcome = json.loads((tmp_path / "out/attn-split-seed1/outcome.json").read_text())
    assert outcome["outcome"] == "stopped" and started(tmp_path)[-1] == "attn-split-seed1"


def test_an_array_has_an_element_for_every_run(tool: Tool, tmp_path: Path, arguments: list[str]) -> None:
    code, output, _ = tool(*arguments, "--sbatch", "--gpus-per-node", "4", "--time", "2:00:00")
    path = tmp_path / "out/array.sbatch"
    assert code == 0 and output.startswith(f"wrote {path}: sbatch {path}, an array of 6;")
    text = path.read_text()
    for line in ("--array=0-5", "--gpus-per-node=4", "--time=2:00:00", "--job-name=ablation", "--output=%x-%A-%a.out"):
        assert text.count(f"\n#SBATCH {line}\n") == 1
    assert subprocess.run(["bash", "-n", str(path)], check=True).returncode == 0
    chosen = text[text.index("case $SLURM_ARRAY_TASK_ID") : text.index("esac") + 4]
    script = f'set -- --bf16; SLURM_ARRAY_TASK_ID=4; {chosen}; printf "%s\\n" "${{arguments[@]}}"'
    words = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True).stdout.splitlines()
    folder = str(tmp_path / "out/attn-split-seed2")
    assert words[-9:] == [
        *("--variant", "attn-split", "--seed", "2", "--save", folder, "--load", folder, "--bf16"),
    ]
    assert not (tmp_path / "out/started").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--save", "a"], "flag --save: every run of the ablation gets its own"),
        (["--seed", "3"], "flag --seed: every run"),
        (["--variants", "ff-attn"], "flag --variants: is given twice"),
        (["--lr", "fast"], "--lr fast: must be a number"),
        (["--attention-dropout", "2"], "--attention-dropout 2.0: must be"),
    ],
)
def test_mistakes_are_told_before_anything_runs(
    tool: Tool, tmp_path: Path, arguments: list[str], more: list[str], words: str
) -> None:
    code, output, errors = tool(*arguments, *more)
    assert (code, output) == (2, "") and errors.startswith(f"error: {words}")
    assert not (tmp_path / "out").exists()
