"""A checkpoint that is no longer what was written: named, with what was expected and found, and never loaded."""

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import Runs
from tests.support.commands import outcome

COMMON = ("--train-iters", "4", "--save-interval", "2")
NEWEST = "run/checkpoints/step_00000004"


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _hole(path: Path) -> None:
    content = bytearray(path.read_bytes())
    start = len(content) // 4
    content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    path.write_bytes(content)


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _swap(path: Path) -> None:
    other = path.with_name("optimizer-00001.safetensors")
    content = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(content)


def _outside(path: Path) -> None:
    """As if another run's file had been put there by a link."""
    target = path.parents[2] / "elsewhere"
    path.rename(target)
    path.symlink_to(target)


JSON = ("state.json", "manifest.json")
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "one bit": (_flip, r"damaged: expected SHA-256 [0-9a-f]{64}, found [0-9a-f]{64}"),
    "4 KiB of zeros": (_hole, r"damaged: expected SHA-256 [0-9a-f]{64}, found [0-9a-f]{64}"),
    "cut in half": (_half, r"damaged: expected [\d,]+ bytes, found [\d,]+"),
    "emptied": (lambda path: path.write_bytes(b""), r"damaged: expected [\d,]+ bytes, found 0"),
    "deleted": (Path.unlink, r"expected a file of [\d,]+ bytes, found none"),
    "two swapped": (_swap, r"damaged: expected (SHA-256 [0-9a-f]{64}, found [0-9a-f]{64}|[\d,]+ bytes, found [\d,]+)"),
    "a link": (_outside, r"expected a file of [\d,]+ bytes, found a symbolic link"),
}


@pytest.fixture(scope="module")
def saved(data: Path, tmp_path_factory: pytest.TempPathFactory, template) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    runs = Runs(folder, data, template)
    runs.succeeds(1, *COMMON)
    return folder / "run"


@pytest.mark.faults
@pytest.mark.parametrize("name", ["optimizer-00001.safetensors", "caches-00001.safetensors", *JSON, "COMPLETE"])
def test_damage_of_any_file_is_named(runs: Runs, saved: Path, name: str) -> None:
    shutil.copytree(saved, runs.folder / "run")
    _flip(runs.folder / NEWEST / name)
    ended = runs.plain(1, 0, "pause@0", *COMMON, "--load", "run")
    assert ended.codes == [2]
    (line,) = ended.errors
    file = "manifest.json" if name == "COMPLETE" else name
    assert line.startswith(f"error: {NEWEST}: {file}: damaged: expected SHA-256 ")
    assert line.endswith("; give --load-fallback to go on from an older step")


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_the_step_before_is_taken_only_when_asked(runs: Runs, saved: Path, name: str) -> None:
    shutil.copytree(saved, runs.folder / "run")
    damage, words = DAMAGE[name]
    damage(runs.folder / NEWEST / "weights-00001.safetensors")
    more = (*COMMON[:1], "5", *COMMON[2:], "--load", "run")
    ended = runs.plain(1, 0, "pause@0", *more)
    assert ended.codes == [2]
    (line,) = ended.errors
    file = r"(weights|optimizer)-00001\.safetensors"
    assert re.fullmatch(f"error: {NEWEST}: {file}: {words}; give --load-fallback to go on from an older step", line), (
        line
    )
    assert outcome(runs.folder / "run") == {
        "outcome": "failed",
        "step": None,
        "reason": line.removeprefix("error: "),
    }
    ended = runs.plain(1, 0, "pause@0", *more, "--load-fallback", "--keep-latest-k", "1")
    assert ended.codes == [0], ended.said
    output = ended.ranks[0].stdout
    assert "resumed from run/checkpoints/step_00000002\n" in output
    assert re.search(f"{NEWEST}: {file}: {words}", output)
    kept, aside = sorted(path.name for path in (runs.folder / NEWEST).parent.iterdir())[::-1]
    assert kept == "step_00000005" and re.fullmatch(r"step_00000004\.damaged-\d+", aside)
    assert f"{NEWEST} is now {aside}, since that step will be made again; nothing deletes it" in output


def test_a_marker_that_is_gone_from_the_step_that_latest_names_is_damage(runs: Runs, saved: Path) -> None:
    shutil.copytree(saved, runs.folder / "run")
    (runs.folder / NEWEST / "COMPLETE").unlink()
    ended = runs.plain(1, 0, "pause@0", *COMMON, "--load", "run")
    assert ended.codes == [2] and "expected a file COMPLETE, found none" in ended.errors[0]


def test_a_save_that_did_not_end_is_passed_over(runs: Runs, saved: Path) -> None:
    shutil.copytree(saved, runs.folder / "run")
    torn = runs.folder / "run/checkpoints/step_00000006"
    shutil.copytree(runs.folder / NEWEST, torn)
    (torn / "COMPLETE").unlink()
    ended = runs.plain(1, 0, "pause@0", *COMMON, "--load", "run")
    assert ended.codes == [0], ended.said
    assert f"resumed from {NEWEST}\n" in ended.ranks[0].stdout
    assert "step_00000006: expected a file COMPLETE, found none (its save did not end)" in ended.ranks[0].stdout


def test_names_from_outside_reach_nothing(runs: Runs, saved: Path) -> None:
    """A manifest, with a marker that fits, that names a file elsewhere."""
    shutil.copytree(saved, runs.folder / "run")
    canary = runs.folder / "canary"
    canary.write_text("mine")
    step = runs.folder / NEWEST
    text = (step / "manifest.json").read_text()
    for name in ("../../../canary", str(canary)):
        changed = text.replace('"state.json"', f'"{name}"')
        (step / "manifest.json").write_text(changed)
        (step / "COMPLETE").write_text(hashlib.sha256(changed.encode()).hexdigest() + "\n")
        ended = runs.plain(1, 0, "pause@0", *COMMON, "--load", "run")
        assert ended.codes == [2] and "expected names of files in this folder, found '" in ended.errors[0]
    assert canary.read_text() == "mine"
