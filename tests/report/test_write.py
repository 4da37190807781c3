"""What is written, where, and what is refused; the tool; long runs."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_allattn.checkpoint.files import StorageError
from megatron_allattn.config import UsageError
from megatron_allattn.report import write_comparison, write_report
from tests.report.synthetic import known_run, run_folder, train
from tests.support.template import ROOT
from tests.support.tools import Tool, in_process

TOOL = ROOT / "tools/report.py"

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib here")


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Tool:
    return in_process(TOOL, capsys)


@needs_matplotlib
def test_a_report_lies_in_the_run_and_is_replaced_as_a_whole(report: Tool, tmp_path: Path) -> None:
    run = known_run(tmp_path / "run")
    before = {path.name for path in run.iterdir()}
    code, out, err = report(run)
    page = run / "report" / "index.html"
    assert (code, out, err) == (0, f"wrote {page}; open it in a browser\n", "")
    assert {path.name for path in run.iterdir()} == before | {"report"}
    html = page.read_text()
    pictures = {path.name for path in page.parent.glob("*.png")}
    assert len(pictures) == 11 == html.count("data:image/png;base64,")
    assert pictures | {"index.html"} == {path.name for path in page.parent.iterdir()}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in page.parent.glob("*.png"))
    assert not re.search(r"https?://|<script|url\(", html)

    (run / "observations.jsonl").unlink()
    (page.parent / "notes.txt").write_text("mine")
    write_report(run)
    left = {path.name for path in page.parent.iterdir()}
    shown = {"loss.png", "loss_late.png", "rate.png", "speed.png", "spans_time.png", "index.html"}
    assert left == shown | {"notes.txt"}


@needs_matplotlib
def test_several_runs_are_on_one_page(report: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [known_run(tmp_path / part / "run") for part in ("a", "b")]
    runs.append(run_folder(tmp_path / "c", [train(1)], recipe="demo"))
    monkeypatch.chdir(tmp_path)
    code, out, err = report(*runs)
    assert (code, out, err) == (0, "wrote report/index.html; open it in a browser\n", "")
    html = (tmp_path / "report" / "index.html").read_text()
    assert html.count("<tr>") == 1 + 3
    for run in runs[:2]:  # of equal names, told apart by their folders
        assert f"</span>{run}</span></td>" in html
    assert "</span>c</span></td>" in html and "</span>demo</span>" not in html and "<span>demo</span>" in html


@needs_matplotlib
def test_mistakes_are_one_line(report: Tool, tmp_path: Path) -> None:
    run = known_run(tmp_path / "run")
    page = tmp_path / "site" / "index.html"
    page.parent.mkdir()
    page.write_text("<h1>mine</h1>")
    for arguments, told in (
        ((run, "--output", page.parent), f"--output {page.parent}: holds another index.html"),
        ((run, run, "--output", tmp_path / "two"), "is given twice; give it once"),
        ((tmp_path / "none",), "is no folder; name the --save folder of a run"),
        ((), "the following arguments are required: DIR; see --help"),
        ((run, "--out", "x"), "flag --out: is unknown; did you mean --output?"),
    ):
        code, out, err = report(*arguments)
        assert (code, out) == (2, "") and err.startswith("error: ") and told in err and err.count("\n") == 1
    assert page.read_text() == "<h1>mine</h1>"


@needs_matplotlib
def test_a_folder_that_cannot_be_made_is_a_storage_error(report: Tool, tmp_path: Path) -> None:
    run = known_run(tmp_path / "run")
    (run / "report").write_text("in the way")
    with pytest.raises(StorageError, match="report: cannot be written"):
        write_report(run)
    code, out, err = report(run)
    assert (code, out) == (1, "") and err.startswith("error: ")


def test_without_matplotlib_it_says_so(report: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = known_run(tmp_path / "run")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    line = "report pictures: need matplotlib, which is not installed; pip install matplotlib"
    for write in (lambda: write_report(run), lambda: write_comparison([run, run], tmp_path / "two")):
        with pytest.raises(UsageError) as error:
            write()
        assert str(error.value) == line
    assert report(run) == (2, "", f"error: {line}\n")
    assert not (run / "report").exists()


@needs_matplotlib
@pytest.mark.parametrize(
    ("steps", "mebibytes"), [(100_000, 300), pytest.param(1_000_000, 500, marks=pytest.mark.layouts)]
)
def test_a_long_run_in_bounded_memory_without_torch(tmp_path: Path, steps: int, mebibytes: int) -> None:
    """A process of its own, whose memory the kernel tells."""
    run = run_folder(tmp_path / "run", [])
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(f'{{"kind":"train","step":{step},"loss":{1 + 4 / step:.5f},"tokens_per_second":{step % 97}}}\n')
        file.write(json.dumps({"kind": "valid", "step": steps, "loss": 1.25}) + "\n")
    program = (
        "import sys; from pathlib import Path; from megatron_allattn.report import write_report; "
        "write_report(Path(sys.argv[1])); assert 'torch' not in sys.modules; "
        "print(Path('/proc/self/status').read_text())"
    )
    output = subprocess.check_output([sys.executable, "-c", program, run], cwd=ROOT, text=True)
    (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", output, re.MULTILINE)  # since the program has begun
    assert int(peak) < mebibytes * 1024
    assert f"{steps:,}" in (run / "report" / "index.html").read_text()
