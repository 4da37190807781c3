"""tools/generate.py: one text under every launcher, from standard input too; mistakes in one line; no DeepSpeed."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, Finished, corpus, environment, free_port, run
from tests.support.runs import untrained_run

TOOL = str(ROOT / "tools/generate.py")
# runs the tool as a program, then tells which of these packages it had loaded by its end
WATCHED = """
import atexit, runpy, sys
sys.argv = sys.argv[1:]
names = ("torch", "deepspeed", "tyro", "mpi4py", "sentencepiece")
atexit.register(lambda: print("loaded", [name for name in names if name in sys.modules]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SHORT = ("--num-tokens-to-generate", "12", "--num_samples", "2", "--top_k", "5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run`: a checkpoint of a network over characters."""
    found = tmp_path_factory.mktemp("generate")
    untrained_run(found / "run", corpus(found, tokenizer="char"))
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> str:
    """What one process prints."""
    done = generate(folder, "--prompt", "the of", launcher=(sys.executable, "-c", WATCHED))
    *text, loaded = done.stdout.splitlines(keepends=True)
    assert (done.stderr, loaded) == ("", "loaded ['torch']\n")
    assert [line[:6] for line in text] == ["--- sa", "the of"] * 2
    assert len(text[1]) == len(text[3]) == len("the of") + 12 + 1
    return "".join(text)


def generate(folder: Path, *flags: str, launcher: tuple[str, ...] = (sys.executable,)) -> Finished:
    done = run(*launcher, TOOL, "--load", "run", *SHORT, *flags, folder=folder)
    assert (done.returncode, done.left) == (0, []), done.output
    return done


def main(*argv: str) -> int:
    """The tool in this process, for what it refuses before torch is loaded."""
    return runpy.run_path(TOOL)["main"](list(argv))


def test_a_file_of_prompts_to_lines_of_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "prompts.jsonl").write_text('"the of"\n{"prompt": "and "}\n')
    several = ("--load", str(folder / "run"), "--prompts-file", str(folder / "prompts.jsonl"), "--batch-size", "1")
    assert main(*several, "--json", "--greedy", "--stop", "e", "--stop", " ") == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["prompt"], one["sample"], one["prompt_text"]) for one in found] == [(0, 0, "the of"), (1, 0, "and ")]
    assert main(*several[:2], "--prompt", "the of", "--prompt", "and ", "--greedy") == 0
    free = capsys.readouterr().out.removeprefix("--- prompt 1 of 2 ---\nthe of").split("\n--- prompt 2 of 2 ---\nand ")
    for one, text in zip(found, free, strict=True):
        shown = text[: min(place for stop in "e " if (place := text.find(stop)) >= 0)]
        assert (one["text"], one["finish"], one["stop"]) == (shown, "stop", text[len(shown)])


@pytest.mark.layouts
def test_two_processes(folder: Path, expected: str) -> None:
    pytest.importorskip("mpi4py", reason="ranks under mpirun are found through mpi4py")
    flags = ("--tensor-model-parallel-size", "2", "--prompt", "the of")
    assert generate(folder, *flags, launcher=("mpirun", "-n", "2", sys.executable)).stdout == expected


@pytest.mark.cluster
def test_standard_input_under_a_launcher(folder: Path, expected: str) -> None:
    command = ["torchrun", "--nproc-per-node", "2", "--master-port", str(free_port()), TOOL, "--load", "run", *SHORT]
    done = subprocess.run(
        [*command, "--tensor-model-parallel-size", "2"],
        input=b"the of",
        cwd=folder,
        env=environment(),
        capture_output=True,
        timeout=240,
        check=True,
    )
    assert done.stdout.decode() == expected


@pytest.mark.cluster
def test_a_conversation_under_a_launcher(folder: Path) -> None:
    def spoken(*command: str, size: int) -> str:
        flags = ("--num-tokens-to-generate", "9", "--tensor-model-parallel-size", str(size))
        done = subprocess.run(
            [*command, TOOL, "--load", "run", "--interactive", *flags],
            input=b"the of\n\n/reset\nthe of",
            cwd=folder,
            env=environment(),
            capture_output=True,
            timeout=240,
            check=True,
        )
        return done.stdout.decode()

    alone = spoken(sys.executable, size=1)
    first, second, third = (alone[at : at + 10] for at in (0, 10, 20))
    assert first == third != second and len(alone) == 30
    assert spoken("torchrun", "--nproc-per-node", "2", "--master-port", str(free_port()), size=2) == alone


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([], "error: the following arguments are required: --load; see --help"),
        (["--load", "R", "--topk", "3"], "error: flag --topk: is unknown; did you mean --top-k?"),
        (["--load", "R", "--top-k", "0"], "error: argument --top-k: '0': must be an integer from 1 to"),
        (["--load", "R", "--top-p", "1.5"], "error: argument --top-p: '1.5': must be a number above 0, up to 1"),
        (["--load", "R", "--top_p=0"], "error: argument --top-p: '0': must be a number above 0, up to 1"),
        (["--load", "R", "--temperature", "0"], "error: argument --temperature: '0': must be a number above 0"),
        (["--load", "R", "--temperature", "inf"], "error: argument --temperature: 'inf': must be a number above 0"),
        (["--load", "R", "--temperature", "hot"], "error: argument --temperature: 'hot': must be a number above 0"),
        (["--load", "R", "--seed=-1"], "error: argument --seed: '-1': must be an integer from 0 to 9223372"),
        (["--load", "R", "--greedy", "--top-k", "3"], "error: --top-k 3: has no effect with --greedy; leave one of"),
        (["--load", "R", "--greedy", "--num-samples", "1"], "error: --num-samples 1: has no effect with --greedy"),
        (["--load", "R", "--bf16", "--float64"], "error: --bf16 --float64: there is one precision"),
        (["--load", "R", "--prompt", "a", "--prompt-file", "b"], "error: --prompt-file b: --prompt is given too"),
        (
            ["--load", "R", "--prompts-file", "a", "--prompt=b"],
            "error: --prompts-file a: --prompt is given too; give one",
        ),
        (
            ["--load", "R", "--prompt-file", "a", "--interactive"],
            "error: flag --interactive: --prompt-file is given too",
        ),
        (
            ["--load", "R", "--interactive", "--num-samples", "2"],
            "error: --num-samples 2: has no effect with --interac",
        ),
        (
            ["--load", "R", "--interactive", "--batch-size", "2"],
            "error: --batch-size 2: has no effect with --interacti",
        ),
        (
            ["--load", "R", "--interactive", "--json"],
            "error: flag --json: has no effect with --interactive; leave one of",
        ),
        (["--load", "R", "--prompt-file", "a", "--prompt-file", "b"], "error: flag --prompt-file: is given twice"),
        (["--load", "R", "--stop", "a", "--stop", ""], "error: argument --stop: '': must have at least one character"),
        (["--load", "R", "--stop", "a\udcff"], r"error: argument --stop: 'a\udcff': must be valid UTF-8"),
        (["--load", "R", "--batch-size", "0"], "error: argument --batch-size: '0': must be an integer from 1 to"),
    ],
)
def test_a_bad_flag_is_one_line(flags: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(*flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(line) and captured.err.count("\n") == 1, captured.err


@pytest.mark.parametrize(
    ("count", "size", "line"),
    [
        ("1", "2", "--tensor-model-parallel-size 2: 1 process does not form a replica of 2 processes; start 2"),
        (
            "2",
            "1",
            "--tensor-model-parallel-size 1: 2 processes would be 2 copies of the model, and one is used; start",
        ),
    ],
)
def test_a_wrong_number_of_processes_is_one_line(
    count: str, size: str, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", count), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    assert main("--load", "run", "--tensor-model-parallel-size", size, "--prompt", "a") == 2
    assert capsys.readouterr().err.startswith(f"error: {line}")
