"""Every command of the pages and every example of --help is run, or at least read by its program's own parser.

How a page says what is run, and in which shortened form: CONTRIBUTING.md, "Commands in pages".
"""

import ast
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from megatron_allattn.config import RECIPES
from megatron_allattn.config.cli import parse_command
from tests.support import commands as programs_of_tests
from tests.support.argument_checks import check
from tests.support.commands import english
from tests.support.documentation import SMALL, Command, Simple, commands, fences, name, pages, programs, with_flags
from tests.support.template import ROOT, Template

COOKBOOK = ROOT / "docs" / "cookbook"
RECIPE_PAGES = {COOKBOOK / f"{name}.md" for name in RECIPES}
TOOLS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tools").glob("*.py"))
PROGRAMS = [*TOOLS, *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "launch").glob("*.py"))]
REFERENCE = ROOT / "tests" / "data" / "reference"
LINKED = ("tools", "launch", "pretrain.py", "megatron_allattn", "ds_configs", "docs", "tests", "README.md", "Makefile")


def page_commands(path: Path) -> list[Command]:
    return commands(path.read_text(), name(path))


def is_run(command: Command) -> bool:
    """Whether a page has this command run: programs of one process, unless the block says why not."""
    alone = command.text.startswith(("python tools/", "python launch/", "python pretrain.py", "for ", "python -m mega"))
    return alone and (command.mark is None or command.mark.run)


RUN_PAGES = [path for path in pages() if path not in RECIPE_PAGES and any(map(is_run, page_commands(path)))]


# commands -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory, template: Template) -> Path:
    """What a reader has: the project, some texts, a trained run by the names that pages use, cases."""
    folder = tmp_path_factory.mktemp("reader") / "checkout"
    folder.mkdir()
    for entry in LINKED:
        (folder / entry).symlink_to(ROOT / entry)
    for text in ("books.txt", "notes.txt"):
        (folder / text).write_text(english(3000).replace(" was ", " was\n"))
    (folder / "prompts.jsonl").write_text('"the of"\n{"prompt": "and to"}\n')
    shutil.copy(REFERENCE / "adaptive_span_char.pt", folder / "checkpoint.pt")
    for suffix in ("pt", "json"):
        shutil.copy(REFERENCE / f"adaptive_span_char.{suffix}", folder / f"CASE.{suffix}")
    vocabulary = json.loads((folder / "CASE.json").read_text())["vocabulary"]
    (folder / "TEXT").write_text("".join(one for one in vocabulary if one.isalpha()) * 40)
    prepare = "tools/prepare_data.py byte --input books.txt notes.txt --output-prefix data/books"
    train = f"pretrain.py --data-path data/books --save runs/books --log-interval 2 {SMALL}"
    for line in (prepare, train):
        start(line.split(), folder, template)
    for run in ("RUN", "runs/a", "runs/b", "runs/c"):
        shutil.copytree(folder / "runs/books", folder / run)
    return folder


def start(words: list[str], folder: Path, template: Template, code: int = 0) -> str:
    """Run a Python program to its end; its standard output."""
    done = programs_of_tests.run(sys.executable, *words, folder=folder, template=template)
    assert done.returncode == code, f"{words}: exit code {done.returncode}\n{done.output}"
    assert not done.left
    return done.stdout


def shortened(command: Command, words: list[str]) -> list[str]:
    """The arguments with what the block's mark gives this program."""
    more = command.mark.flags.get(words[0], []) if command.mark is not None else []
    return with_flags(words, more)


def run_command(command: Command, folder: Path, template: Template) -> None:
    """As it stands on a page, but for what its mark says."""
    if command.text.startswith("for "):
        done = programs_of_tests.run("bash", "-ec", command.text, folder=folder)
        assert done.returncode == 0, done.output
        return
    expected = int(found[1]) if (found := re.match(r"exit code (\d)", command.comment)) else 0
    for simple in programs(command.text, folder):
        words = simple.words[1:]
        words = [str(ROOT / "megatron_allattn/__main__.py"), *words[2:]] if words[0] == "-m" else words
        printed = start(shortened(command, words), folder, template, expected)
        if simple.output:
            (folder / simple.output).write_text(printed)


@pytest.mark.parametrize("path", RUN_PAGES, ids=name)
def test_commands_of_a_page_run(path: Path, checkout: Path, template: Template, tmp_path: Path) -> None:
    """One after the other, in a folder in which nothing was done but what every reader has."""
    folder = tmp_path / "checkout"
    shutil.copytree(checkout, folder, symlinks=True)
    for command in filter(is_run, page_commands(path)):
        run_command(command, folder, template)
    if path.name == "README.md":  # its lines for transformers, on what its command has made
        (snippet,) = [code for language, code in fences(path.read_text()) if language == "python"]
        (folder / "load.py").write_text(snippet)
        assert start(["load.py"], folder, template).startswith("The checkpoint")


@pytest.mark.parametrize("path", [path for path in pages() if path not in RECIPE_PAGES], ids=name)
def test_commands_of_a_page_are_read_by_their_programs(path: Path, checkout: Path) -> None:
    """Those that are not run; a command that no rule knows is refused."""
    for command in page_commands(path):
        if not is_run(command):
            checked(command, checkout)


def checked(command: Command, folder: Path) -> None:
    parts = [Simple({}, ["for"])] if command.text.startswith("for ") else programs(command.text, folder)
    for simple in parts:
        try:
            check(simple.words, simple.variables, folder)
        except Exception as error:
            raise AssertionError(f"{command}: {error}") from error


@pytest.mark.parametrize("path", sorted(RECIPE_PAGES), ids=name)
def test_recipe_pages_have_the_commands_that_test_cookbook_reads(path: Path) -> None:
    parts = re.split(r"^## (.*)$", path.read_text(), flags=re.M)
    by_heading = {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}
    for heading, text in by_heading.items():
        assert len(commands(text)) == (heading == "Data" or bool(re.fullmatch(r"\d+ GPUs?", heading))), heading


@pytest.mark.parametrize("path", pages(), ids=name)
def test_marks_are_true(path: Path) -> None:
    """A test that is said to run a block knows of its program."""
    for command in page_commands(path):
        reason = command.mark.reason if command.mark is not None else ""
        known = "".join((ROOT / file).read_text() for file in re.findall(r"tests/\S+\.py", reason))
        _, named, tests = reason.partition("run by ")
        assert not named or tests, command
        program = re.search(r"tools/\w+|launch/submit", command.text)
        assert not known or program is None or program[0].split("/")[1] in known or path.name == "README.md", command


# --help ---------------------------------------------------------------------------------------------------------------


def help_examples(program: str) -> list[Command]:
    text = ast.get_docstring(ast.parse((ROOT / program).read_text())) or ""
    starts = ("python", "torchrun", "srun")
    return [one for one in commands(text, program) if one.text.startswith(starts)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_examples_of_help_are_read_by_their_programs(program: str, checkout: Path) -> None:
    examples = help_examples(program)
    assert examples, f"{program} has no example"
    for example in examples:
        checked(example, checkout)


RUN_ELSEWHERE = {
    "tools/ablation.py": "cli/test_ablation.py",
    "tools/benchmark.py": "cli/test_benchmark.py",
    "tools/plan.py": "cli/test_plan.py",
    "tools/report.py": "report/test_write.py",
    "tools/preflight.py": "cli/test_preflight.py",
    "tools/verify_reference.py": "cli/test_verify_reference.py",
    "launch/submit.py": "cli/test_submit.py",
    "launch/launcher.py": "cli/test_launch_scripts.py",
    "launch/rank.py": "cluster/nodes/test_rank_process.py",
}
"""Programs whose examples take minutes, GPUs or hosts, and the tests that run them at a size of their own."""


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_example_of_help_is_run(program: str) -> None:
    """As it stands: it is a command of a page that is run without a mark, or at another size by tests of its own."""
    if program in RUN_ELSEWHERE:
        assert Path(program).stem in (ROOT / "tests" / RUN_ELSEWHERE[program]).read_text()
        return
    on_pages = {command.text for path in RUN_PAGES for command in page_commands(path) if is_run(command)}
    assert on_pages & {example.text for example in help_examples(program)}


def test_the_examples_of_pretrains_help(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_command(["--help"])
    printed = capsys.readouterr().out
    examples = re.findall(r"^python pretrain.*$", printed, re.M)
    assert len(examples) == 2
    for example in examples:
        checked(Command("pretrain.py --help", 0, example), checkout)


# what the tests themselves would miss ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("frobnicate RUN", "no rule covers"),
        ("python tools/nothing.py RUN", "no rule checks"),
        ("python tools/evaluate.py --lod RUN", "did you mean --load"),
        ("python pretrain.py --recipe nothing", "unknown recipe"),
        ("python tools/plan.py --recipe demo --nods 3", "--nods: unknown flag"),
        ("deepspeed --num_gpus 8 pretrain.py --num-layer 3", "did you mean --num-layers"),
        ("torchrun --nproc-per-node 2 tools/generate.py --load RUN --prompts TEXT", "did you mean --prompt"),
        ("mpirun -n 2 python pretrain.py --bf16 --fp16", "one precision"),
        ("HOSTFILE=hosts launch/nothing.sh --recipe demo", "No such file"),
        ("launch/mpirun.sh --recipe demo --lr x", "--lr"),
        ("make nothing", "nothing"),
        ("python -m pytest tests/nothing.py", "tests/nothing.py"),
    ],
)
def test_a_wrong_command_is_refused(command: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        checked(Command("page", 1, command), tmp_path)


def test_commands_are_found_with_their_marks() -> None:
    block = "    python a.py \\\n        --b 1   # why\n    make c\n<!-- test: run with a.py --b 2 -->\n"
    text = f"Text\n\n{block}\n```text\n    no\n```\n"
    first, second = commands(text)
    assert (first.text, first.comment, second.text) == ("python a.py --b 1", "why", "make c")
    assert first.mark == second.mark and first.mark is not None and first.mark.flags == {"a.py": ["--b", "2"]}
    with pytest.raises(ValueError, match="no mark"):
        commands("    make c\n<!-- test: nothing -->\n")


def test_flags_of_a_mark_take_the_place_of_the_same_ones() -> None:
    assert with_flags(["a.py", "--n", "1", "--x", "--m", "2"], ["--n", "3", "--y"]) == [
        "a.py",
        "--x",
        "--m",
        "2",
        "--n",
        "3",
        "--y",
    ]
