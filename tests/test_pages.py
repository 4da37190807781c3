"""The pages themselves: links lead somewhere, files and flags that they name exist, figures of the README stand on the
pages that it names. Nothing is run here; tests/test_documentation.py runs their commands."""

import re
import xml.etree.ElementTree as xml
from functools import cache
from pathlib import Path

import pytest

from tests.support.documentation import fences, name, pages
from tests.support.template import ROOT

EVERY_PAGE = [*pages(), ROOT / "CHANGELOG.md"]
SOURCES = ("megatron_allattn", "tools", "launch", "tests/gpu", "tests/benchmarks")
MADE = {"ablation/array.sbatch", "runs/ablation/array.sbatch", "command.sh", "job.sbatch"}
"""Files that programs write."""

OF_OTHERS = {"--no-deps", "--ffn-hidden-size", "--include_path", "--model_args", "--tasks", "--batch_size", "--logdir"}
"""Flags of pip, Megatron-LM, lm_eval and tensorboard."""


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M):
        plain = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        repeated = next(number for number in range(100) if (f"{anchor}-{number}" if number else anchor) not in found)
        found.add(f"{anchor}-{repeated}" if repeated else anchor)
    return found


@pytest.mark.parametrize("path", EVERY_PAGE, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", link):
            continue
        target, _, anchor = link.partition("#")
        other = (path.parent / target) if target else path
        assert other.exists(), f"{name(path)}: {link}"
        assert not anchor or anchor in anchors(other.read_text()), f"{name(path)}: {link} names no heading"


def test_anchors_are_githubs() -> None:
    assert anchors("# A b\n## W&B: `x`\n## A b\n```\n# no\n```\n") == {"a-b", "wb-x", "a-b-1"}


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    linked = {(ROOT / "docs" / link).resolve() for link in re.findall(r"\]\(([^)#]+)", index)}
    assert {*(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / "README.md"} <= linked


@cache
def names_of_files() -> frozenset[str]:
    folders = ("megatron_allattn", "tests", "launch", "docs", "tools")
    return frozenset(path.name for folder in folders for path in (ROOT / folder).rglob("*.*"))


@pytest.mark.parametrize("path", pages(), ids=name)
def test_files_that_are_named_exist(path: Path) -> None:
    """From the root, the package, its tests or cluster/; after one with its folder, a bare name is enough."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    bases = [ROOT, path.parent, *(ROOT / one for one in ("megatron_allattn", "megatron_allattn/cluster", "tests"))]
    for file in set(re.findall(r"(?<![\w/.<>{-])[A-Za-z_][\w./-]*\.(?:py|cpp|h|sbatch|sh|md)\b", text)) - MADE:
        found = file in names_of_files() if "/" not in file else any((base / file).exists() for base in bases)
        assert found or (path.parent / file).exists() or (ROOT / file).exists(), f"{name(path)}: there is no {file}"


@cache
def known_flags() -> frozenset[str]:
    """Of all programs: what their sources spell out, and the fields of configurations."""
    files = (
        path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh", ".sbatch")
    )
    text = "\n".join(path.read_text() for path in files)
    fields = {f"--{field.replace('_', '-')}" for field in re.findall(r"^    (\w+): ", text, re.M)}
    return frozenset(
        {*re.findall(r"--[a-z][\w-]*", text), *fields, *(field.replace("--", "--no-", 1) for field in fields)}
    )


@pytest.mark.parametrize("path", pages(), ids=name)
def test_flags_that_are_named_exist(path: Path) -> None:
    given = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", path.read_text()))
    assert {flag.rstrip("-") for flag in given} <= {*known_flags(), *OF_OTHERS, "--no-untie"}


@pytest.mark.parametrize("path", pages(), ids=name)
def test_fences_name_their_language(path: Path) -> None:
    """One of a shell would hide commands from these tests."""
    assert {language for language, _ in fences(path.read_text())} <= {"text", "python", "json", "yaml"}


def test_measured_figures_are_those_of_their_pages() -> None:
    table = (ROOT / "README.md").read_text().partition("## Measured")[2].partition("## ")[0]
    rows = re.findall(r"^\| (?!what)(.+?) \| (.+?) \| (.+?) \| \[.*?\]\((.*?)#", table, re.M)
    assert len(rows) >= 8
    for what, result, _, page in rows:
        text = (ROOT / page).read_text()
        for figure in re.findall(r"\d[\d,.]*(?:e-\d+)?", result):
            assert figure.rstrip(".,") in text, f"{what}: {figure} is not in {page}"


def test_the_drawing_is_of_the_layer() -> None:
    """Well-formed, for readers of either colour scheme, with a text for those who do not see it."""
    drawing = ROOT / "docs" / "images" / "layer.svg"
    root = xml.parse(drawing).getroot()
    space = {"s": "http://www.w3.org/2000/svg"}
    assert (root.findtext("s:title", "", space), len(root.findtext("s:desc", "", space)) > 200) == (
        "The all-attention layer",
        True,
    )
    assert "prefers-color-scheme: dark" in drawing.read_text()
    words = " ".join("".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text"))
    for part in ("one softmax over both sets", "persistent vectors", "mask", "all-reduce", "LayerNorm", "cache"):
        assert part in words


def test_pictures_are_small() -> None:
    for picture in (ROOT / "docs" / "images").iterdir():
        assert picture.stat().st_size < 200_000, picture
