"""Whether a command line would be taken: each program's arguments are read by the very parser of that program.

For commands that a test cannot run, as they need GPUs, several hosts or a network.
"""

import re
import runpy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from megatron_allattn.cluster.jobs.arguments import submitted
from megatron_allattn.cluster.nodes import hostfile
from megatron_allattn.config.cli import parse_command
from tests.support.template import ROOT

Check = Callable[[list[str]], None]
SHELL = {"cd", "cat", "tail", "touch", "for", "export", "."}
"""Words of a shell that name nothing of ours."""

OTHERS = {
    "git": ("clone",),
    "pip": ("install",),
    "wandb": ("sync",),
    "tensorboard": ("--logdir",),
    "lm_eval": ("--model",),
}
"""Programs of others, and the first words that are expected of them: they are not ours to check."""


@cache
def module(path: str) -> dict[str, Any]:
    """The names of a program's file."""
    return runpy.run_path(str(ROOT / path))


def check(words: list[str], variables: Mapping[str, str], page_folder: Path) -> None:
    """Raises AssertionError or UsageError: this would not be taken, or no rule says what it is."""
    first = words[0] if words else ""
    if (not words and variables) or first in SHELL:
        return
    if first in OTHERS:
        assert words[1].split("=")[0] in OTHERS[first], words
    elif first == "python":
        _python(words[1:], page_folder)
    elif first == "make":
        targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)
        assert targets is not None and {word for word in words[1:] if "=" not in word} <= {*targets[1].split()}, words
    elif first == "sbatch" and words[-1].endswith("/array.sbatch"):
        _array(words[1:])
    elif first in LAUNCHERS:
        _program(*LAUNCHERS[first](words[1:]))
    elif first == ".ci/run" or first.startswith("launch/"):
        assert (ROOT / first).stat().st_mode & 0o100, f"{first} is not executable"
        if first.startswith("launch/"):
            _program(variables.get("PROGRAM", "pretrain.py"), words[1:])
    else:
        raise AssertionError(
            f"no rule covers {words}: a program of ours, of others (OTHERS), or a fence with a language"
        )


def _python(words: list[str], page_folder: Path) -> None:
    if words[0] == "-m":
        assert words[1] in ("pytest", "megatron_allattn"), words
        for path in (word for word in words[2:] if word.startswith("tests/")):
            assert (ROOT / path).exists(), path
            selected = words[words.index("-k") + 1] if "-k" in words else ""
            assert selected in (ROOT / path).read_text(), f"{path} has no {selected}"
        return
    _program(words[0], words[1:])


def _program(path: str, words: list[str]) -> None:
    assert path in PROGRAMS or path.startswith("tests/"), f"no rule checks the arguments of {path}"
    assert (ROOT / path).is_file(), f"there is no {path}"
    if path in PROGRAMS:
        with _ends_well():
            PROGRAMS[path](words)


@contextmanager
def _ends_well() -> Iterator[None]:
    """Parsers that print and leave must do so with exit code 0."""
    try:
        yield
    except SystemExit as end:
        assert not end.code, f"exit code {end.code}"


def _own(path: str) -> Check:
    """`_parser()` of a tool that has no other arguments than its own."""
    return lambda words: module(path)["_parser"]().parse_args(words)


def _beside_pretrain(path: str, read_others: Check) -> Check:
    """Flags of a tool, and those of pretrain.py."""

    def read(words: list[str]) -> None:
        parser = module(path)["_parser"]()
        own, others = parser.split(words)
        parser.parse_args(own)
        read_others(others)

    return read


def _parsed(path: str, function: str = "parse") -> Check:
    """A tool's own function that reads its arguments."""
    return lambda words: module(path)[function](words)


def _pretrain_of_job(words: list[str]) -> None:
    submitted(words if "--save" in words else [*words, "--save", "run"])  # an ellipsis stands for it


def _hostfile(words: list[str]) -> None:
    assert words[0] in hostfile.FORMS and len(words) == 2


PROGRAMS: dict[str, Check] = {
    "pretrain.py": parse_command,
    "launch/submit.py": _beside_pretrain("launch/submit.py", _pretrain_of_job),
    "launch/hostfile.py": _hostfile,
    "launch/launcher.py": lambda words: check(words, {}, ROOT),
    "launch/rank.py": lambda words: check(["python", *words], {}, ROOT),
    "launch/pretrain.sbatch": _pretrain_of_job,
    "tools/ablation.py": _beside_pretrain("tools/ablation.py", parse_command),
    "tools/plan.py": _beside_pretrain("tools/plan.py", parse_command),
    "tools/benchmark.py": _parsed("tools/benchmark.py"),
    "tools/preflight.py": _parsed("tools/preflight.py"),
    "tools/prepare_data.py": _parsed("tools/prepare_data.py"),
    "tools/verify_reference.py": _parsed("tools/verify_reference.py"),
    "tools/convert_checkpoint.py": _parsed("tools/convert_checkpoint.py", "parse_arguments"),
    "tools/report.py": _own("tools/report.py"),
    "tools/watch.py": _own("tools/watch.py"),
    "tools/inspect_checkpoint.py": _own("tools/inspect_checkpoint.py"),
    "tools/evaluate.py": _own("tools/evaluate.py"),
    "tools/generate.py": _own("tools/generate.py"),
}


def _deepspeed(words: list[str]) -> tuple[str, list[str]]:
    from deepspeed.launcher.runner import parse_args

    found = parse_args(words)
    return found.user_script, found.user_args


def _torchrun(words: list[str]) -> tuple[str, list[str]]:
    from torch.distributed.run import get_args_parser

    found = get_args_parser().parse_args(words)
    return found.training_script, found.training_script_args


def _mpirun(words: list[str]) -> tuple[str, list[str]]:
    assert words[0] == "-n" and words[1].isdigit() and words[2] == "python", words
    return words[3], words[4:]


def _srun(words: list[str]) -> tuple[str, list[str]]:
    rest = list(words)
    while rest[0].startswith("-"):
        assert re.match(r"--[a-z-]+=\S+|-n$", rest[0]), rest[0]
        rest = rest[2:] if rest[0] == "-n" else rest[1:]
    assert rest[0] == "python", rest
    return rest[1], rest[2:]


def _sbatch(words: list[str]) -> tuple[str, list[str]]:
    rest = [word for word in words if not re.match(r"--(nodes|ntasks-per-node|gpus-per-node|export)=", word)]
    return rest[0], rest[1:]


def _array(words: list[str]) -> None:
    """`sbatch --array=… DIR/array.sbatch`, of which tools/ablation.py tells when it has written that file."""
    assert re.fullmatch(r"--array=[0-9]+-[0-9]+(%[0-9]+)?", words[0]) and len(words) == 2, words


LAUNCHERS: dict[str, Callable[[list[str]], tuple[str, list[str]]]] = {
    "deepspeed": _deepspeed,
    "torchrun": _torchrun,
    "mpirun": _mpirun,
    "srun": _srun,
    "sbatch": _sbatch,
}
