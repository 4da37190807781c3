"""What the documentation has in it: commands, and marks that say how a test takes them; the rules are CONTRIBUTING's.

An indented block is commands; whatever else stands apart is fenced, with its language. A comment in the line behind a
block is its mark:

    <!-- test: run small with PROGRAM FLAGS; PROGRAM FLAGS -->
    <!-- test: parse: REASON -->

Without one, commands of one process are run as they stand, and those of launchers are parsed.
"""

import re
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.template import ROOT

MARK = re.compile(r"<!-- test: (.*) -->")
SMALL = "--num-layers 1 --global-batch-size 2 --seq-length 32 --train-iters 4 --eval-iters 1 --no-report"
"""What `small` gives every pretrain.py of a block."""


@dataclass(frozen=True)
class Mark:
    """run: whether commands are run; flags: what is put behind those of a program; reason: why they are not run."""

    run: bool
    flags: dict[str, list[str]] = field(default_factory=dict)
    reason: str = ""

    @classmethod
    def of(cls, text: str) -> "Mark":
        """Raises ValueError: it is none."""
        if text.startswith("parse: ") and text[7:].strip():
            return cls(run=False, reason=text[7:])
        found = re.fullmatch(r"run( small)?( with (.+))?", text)
        if found is None:
            raise ValueError(f"no mark: {text}")
        flags = {"pretrain.py": shlex.split(SMALL)} if found[1] else {}
        for part in (found[3] or "").split(";"):
            program, *words = shlex.split(part) or [""]
            if program:
                flags[program] = with_flags(flags.get(program, []), words)
        return cls(run=True, flags=flags)


@dataclass(frozen=True)
class Command:
    """A command line: its text, continued lines joined, the comment behind it, and the mark of its block."""

    page: str
    line: int
    text: str
    comment: str = ""
    mark: Mark | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def pages() -> list[Path]:
    """All pages with commands for readers."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name(path: Path) -> str:
    """A page's path from the root."""
    return path.relative_to(ROOT).as_posix()


def commands(text: str, page: str = "") -> list[Command]:
    """The commands of a page."""
    found: list[Command] = []
    block: list[Command] = []
    fenced, lines = False, [*text.splitlines(), ""]
    for number, line in enumerate(lines, start=1):
        fenced ^= line.startswith("```")
        if fenced or line.startswith("```"):
            continue
        if line.startswith("    ") and line.strip():
            if block and block[-1].text.endswith("\\"):
                block[-1] = _command(page, block[-1].line, f"{block[-1].text[:-1].rstrip()} {line.strip()}")
            else:
                block.append(_command(page, number, line.strip()))
            continue
        mark = MARK.fullmatch(line)
        found += [
            Command(one.page, one.line, one.text, one.comment, Mark.of(mark[1]) if mark else None) for one in block
        ]
        assert block or not mark, f"{page}:{number}: a mark stands in the line behind a block of commands"
        block = []
    return found


def _command(page: str, line: int, text: str) -> Command:
    text, _, comment = f"{text} ".partition(" # ")
    return Command(page, line, text.strip(), comment.strip())


def fences(text: str) -> list[tuple[str, str]]:
    """(language, content) of every fenced block."""
    return re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.M | re.S)


@dataclass(frozen=True)
class Simple:
    """One program of a command line: variables before it, its words, where its output goes."""

    variables: dict[str, str]
    words: list[str]
    output: str | None = None


def programs(text: str, folder: Path) -> list[Simple]:
    """What a shell in `folder` would start; an ellipsis stands for flags that a reader adds."""
    return [_simple(part, folder) for part in text.split(" && ")]


def _simple(text: str, folder: Path) -> Simple:
    output = re.search(r" > (\S+)", text)
    text = re.sub(r" [<>] \S+", "", text)
    words = [word for word in expanded(text, folder) if word != "…"]
    variables = {}
    while words and re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    return Simple(variables, words, output[1] if output else None)


def expanded(text: str, folder: Path) -> list[str]:
    """The words that bash makes of a text, globs and quotes included."""
    if not re.search(r"[*?$`{~]", text):
        return shlex.split(text)
    line = f"printf '%s\\0' {text}"
    return subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, check=True).stdout.split(
        "\0"
    )[:-1]


def with_flags(words: list[str], more: list[str]) -> list[str]:
    """The words with further flags, each in place of the same one."""
    kept, skip = [], False
    new = {word for word in more if word.startswith("--")}
    for word in words:
        if skip and not word.startswith("--"):
            continue
        skip = word in new
        kept += [] if skip else [word]
    return [*kept, *more]
