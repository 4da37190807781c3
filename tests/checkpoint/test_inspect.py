"""tools/inspect_checkpoint.py: what it prints and its exit codes, on checkpoints whose content is known."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_allattn.checkpoint import folder, manifest
from megatron_allattn.checkpoint.compare import differences, not_finite, pieces, places, state_differences
from megatron_allattn.checkpoint.files import write_json_atomic
from megatron_allattn.checkpoint.folder import begin, commit
from megatron_allattn.checkpoint.header import ITEM_BYTES, TensorInfo, pack_header
from megatron_allattn.checkpoint.inspect import inspect
from megatron_allattn.checkpoint.tensors import DTYPE_NAMES
from megatron_allattn.config.errors import UsageError
from tests.support.checkpoints import write_tensors_to
from tests.support.template import ROOT

STATE = {
    "step": 12,
    "config": {"model": {"num_layers": 2, "adaptive_span": True}, "recipe": None},
    "data": {"position": 640, "offsets": list(range(100))},
    "versions": {"torch": "2.13.0"},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    temporary = begin(tmp_path, 12)
    for prefix, tensors in (
        ("weights", {"layers.0.query": torch.ones(3, 4), "layers.0.span": torch.zeros(2, dtype=torch.float64)}),
        ("optimizer", {"layers.0.query.moment": torch.ones(3, 4, dtype=torch.bfloat16), "step": torch.tensor(12)}),
    ):
        write_tensors_to(temporary, prefix, tensors)
    write_json_atomic(temporary / "state.json", STATE)
    commit(temporary, 12)
    return tmp_path


def _inspect(*arguments: object) -> tuple[int, str, str]:
    command = [sys.executable, str(ROOT / "tools/inspect_checkpoint.py"), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT.parent, timeout=60)
    return result.returncode, result.stdout, result.stderr


def test_text_of_an_intact_checkpoint(run: Path):
    code, output, errors = _inspect(run)
    assert (code, errors) == (0, "")
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert lines == [
        f"checkpoint {run}/checkpoints/step_00000012",
        *["step: 12", "config:", "model:", "num_layers: 2", "adaptive_span: true", "recipe: null"],
        *["data:", "position: 640", "offsets: a list of 100", "versions:", 'torch: "2.13.0"'],
        "optimizer-00001.safetensors: 2 tensors, 32 bytes",
        "layers.0.query.moment BF16 [3, 4] 24",
        "step I64 [] 8",
        "weights-00001.safetensors: 2 tensors, 64 bytes",
        "layers.0.query F32 [3, 4] 48",
        "layers.0.span F64 [2] 16",
        "total: 4 tensors, 96 bytes",
        "intact as far as sizes tell; --verify compares every byte and looks at every number",
    ]
    code, output, errors = _inspect(run, "--verify")
    assert (code, errors) == (0, "")
    assert output.splitlines()[-1] == "intact: every file matches the manifest, every number is finite"


def test_json_of_a_step_folder(run: Path):
    code, output, _errors = _inspect("--json", run / "checkpoints" / "step_00000012")
    found = json.loads(output)
    assert code == 0
    assert (found["intact"], found["problems"], found["state"]) == (True, [], STATE)
    assert found["tensors"][2] == {
        "file": "weights-00001.safetensors",
        "name": "layers.0.query",
        "dtype": "F32",
        "shape": [3, 4],
        "bytes": 48,
    }


def test_damage_is_exit_code_1(run: Path):
    folder = run / "checkpoints" / "step_00000012"
    content = bytearray((folder / "weights-00001.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "weights-00001.safetensors").write_bytes(content)
    assert _inspect(folder)[0] == 0  # the size is what it was
    code, output, errors = _inspect(folder, "--verify")
    assert (code, errors) == (1, "")
    last = output.splitlines()[-1]
    assert last.startswith(f"damaged: {folder}/weights-00001.safetensors: damaged: expected SHA-256 ")
    (folder / "weights-00001.safetensors").write_bytes(b"short")
    (folder / "state.json").write_text("{")
    (folder / "COMPLETE").unlink()
    code, output, _errors = _inspect(folder, "--json")
    problems = json.loads(output)["problems"]
    assert code == 1
    assert [problem.removeprefix(f"{folder}").split(":")[0] for problem in problems] == [
        "",
        "/weights-00001.safetensors",
        "/state.json",
    ]


def test_a_newer_incomplete_step_is_mentioned(run: Path):
    (run / "checkpoints" / "step_00000013").mkdir()
    code, output, _errors = _inspect(run)
    assert code == 0
    assert output.splitlines()[1].endswith("step_00000013: expected a file COMPLETE, found none (its save did not end)")


@pytest.mark.parametrize("part", ["latest", "checkpoints"])
def test_a_part_of_a_run_names_the_run(run: Path, part: str) -> None:
    with pytest.raises(UsageError, match=f"{part}: neither a run folder nor a step folder; name the run folder {run}$"):
        inspect(run / part)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a path, or --diff A B"),
        (["nowhere"], "nowhere: neither a run folder nor a step folder"),
        ([ROOT / "setup.py"], "neither a run folder nor a step folder"),
        (["--diff", "a", "b", "--json"], "--diff A B: --json has no effect"),
        (["nowhere", "--yaml"], "flag --yaml: is unknown; see --help"),
        (["nowhere", "--ver"], "flag --ver: is unknown; did you mean --verify?"),
        (["nowhere", "--json", "--json"], "flag --json: is given twice; give it once"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[object], message: str):
    code, output, errors = _inspect(*arguments)
    assert (code, output) == (2, "")
    assert errors.startswith("error: ") and message in errors and errors.count("\n") == 1


def test_a_damaged_newest_step_is_what_is_looked_at(run: Path) -> None:
    temporary = begin(run, 13)
    write_tensors_to(temporary, "weights", {"a": torch.ones(3)})
    step = commit(temporary, 13)
    (step / "weights-00001.safetensors").write_bytes(b"short")
    code, output, _ = _inspect(run)
    assert code == 1 and output.startswith(f"checkpoint {step}\n") and "damaged: " in output


def test_a_run_whose_only_step_is_damaged(run: Path) -> None:
    (run / "checkpoints/step_00000012/weights-00001.safetensors").unlink()
    code, output, errors = _inspect(run)
    assert (code, errors) == (1, "")
    assert "damaged: " in output and "weights-00001.safetensors: expected a file of " in output


def test_numbers_that_are_not_finite_are_found(tmp_path: Path) -> None:
    temporary = begin(tmp_path, 1)
    tensors = {"a": torch.tensor([1.0, math.inf]), "b": torch.tensor([math.nan, 1.0, math.nan]).bfloat16()}
    write_tensors_to(temporary, "weights", tensors | {"c": torch.ones(5, dtype=torch.float64)})
    write_json_atomic(temporary / "state.json", {"step": 1})
    commit(temporary, 1)
    code, output, _ = _inspect(tmp_path, "--verify")
    assert code == 1
    assert [line.rpartition(": ")[2] for line in output.splitlines()[-2:]] == [
        "1 numbers are not finite",
        "2 numbers are not finite",
    ]


def test_what_differs_is_told(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    temporary = begin(other, 12)
    changed = torch.ones(3, 4)
    changed[1, 2] = 1.5
    span, moment = torch.zeros(2, dtype=torch.float64), torch.ones(2, 6, dtype=torch.bfloat16)
    write_tensors_to(temporary, "weights", {"layers.0.query": changed, "layers.0.span": span})
    write_tensors_to(temporary, "optimizer", {"layers.0.query.moment": moment, "count": torch.tensor(12)})
    write_json_atomic(temporary / "state.json", STATE | {"step": 13})
    commit(temporary, 12)
    assert _inspect("--diff", run, run) == (0, "the same: every tensor and every value of the state\n", "")
    code, output, errors = _inspect("--diff", run, other)
    assert (code, errors) == (1, "")
    assert output.splitlines() == [
        "optimizer count: only in B",
        "optimizer layers.0.query.moment: BF16 [3, 4] in A, BF16 [2, 6] in B",
        "optimizer step: only in A",
        "weights layers.0.query: 1 of 12 elements differ, by at most 0.5",
        "state: step: 12 in A, 13 in B",
    ]


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_numbers_of_every_type_are_looked_at(tmp_path: Path, dtype: str) -> None:
    """Their values against torch's, over all bytes, and what is not finite is counted."""
    types = {name: one for one, name in DTYPE_NAMES.items()} | {
        "C64": torch.complex64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
    }
    raw = torch.arange(256, dtype=torch.uint8)
    raw = raw % 2 if dtype == "BOOL" else raw
    info = TensorInfo("a", dtype, (256 // ITEM_BYTES[dtype],), 256)
    (tmp_path / "weights-00001.safetensors").write_bytes(pack_header([info]) + raw.numpy().tobytes())
    (place,) = places({"weights-00001.safetensors": [info]}, tmp_path).values()
    (found,) = pieces(place)
    values = raw.view(types[dtype])
    wide = torch.complex128 if dtype == "C64" else torch.float64
    np.testing.assert_array_equal(found.astype("c16" if dtype == "C64" else "f8"), values.to(wide).numpy())
    assert not_finite(place) == int((~values.to(wide).isfinite()).sum())
    assert differences({"a": place}, {"a": place}) == []


def test_whole_numbers_do_not_wrap_around(tmp_path: Path) -> None:
    where = []
    for name, value in (("x", 0), ("y", 2**64 - 1)):
        info = TensorInfo("a", "U64", (1,), 8)
        (tmp_path / f"{name}-1.safetensors").write_bytes(pack_header([info]) + value.to_bytes(8, "little"))
        (place,) = places({f"{name}-1.safetensors": [info]}, tmp_path).values()
        where.append({"a": place})
    assert differences(*where) == ["a: 1 of 1 elements differ, by at most 1.84e+19"]


def test_what_only_looks_equal_differs(tmp_path: Path) -> None:
    where = []
    for name, value in (("x", 0.0), ("y", -0.0)):
        (tmp_path / name).mkdir()
        write_tensors_to(tmp_path / name, "weights", {"a": torch.tensor([1.0, value])})
        infos = {"weights-00001.safetensors": [TensorInfo("a", "F32", (2,), 8)]}
        where.append(places(infos, tmp_path / name))
    assert differences(*where) == ["weights a: 1 of 2 elements differ, by at most 0"]
    one = {"a": True, "b": {"c": 2304}, "d": [0.0], "e": None, "f": {"g": 1, "h": 2}}
    other = {"a": 1, "b": {"c": 2304.0}, "d": [-0.0], "f": {"h": 2, "g": 1}}
    assert state_differences(one, other) == [
        "a: true in A, 1 in B",
        "b.c: 2304 in A, 2304.0 in B",
        "d: [0.0] in A, [-0.0] in B",
        "e: only in A",
    ]


@pytest.mark.parametrize("of_run", [True, False])
@pytest.mark.parametrize(
    "look",
    [lambda path: folder.find(path)[0], lambda path: inspect(path, every_byte=True).folder],
    ids=["find", "inspect"],
)
def test_a_step_that_its_run_deletes_meanwhile(
    run: Path, monkeypatch: pytest.MonkeyPatch, look: Callable[[Path], Path], of_run: bool
) -> None:
    """The run saves step 13 and keeps one, as soon as step 12 has been found: the newest is looked for again."""
    old, real = run / "checkpoints" / "step_00000012", manifest.check_sha256

    def deleting(path: Path, expected: str) -> None:
        if old.exists():
            temporary = begin(run, 13)
            write_tensors_to(temporary, "weights", {"a": torch.ones(3)})
            write_json_atomic(temporary / "state.json", STATE | {"step": 13})
            commit(temporary, 13)
            assert folder.retain(run, 13, 1, 0) == []
        real(path, expected)

    monkeypatch.setattr(manifest, "check_sha256", deleting)
    if of_run:
        assert look(run).name == "step_00000013"
    else:
        with pytest.raises(UsageError, match=f"^{old}: is gone, its run has deleted it meanwhile"):
            look(old)
    assert not old.exists()
