"""What cannot be done is refused in one line that names flag or file, value, rule and way out; nothing is left behind.

Everything here is the real program in a process of its own, and much of it in several ranks, of which one speaks.
"""

import json
import re
import shutil
import socket
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from tests.support.commands import (
    BIN,
    NONE,
    PRETRAIN,
    ROOT,
    TINY,
    Finished,
    Variables,
    corpus,
    free_port,
    outcome,
    run,
    run_ranks,
)
from tests.support.template import Template

STEPS = 2
OUTCOME = "old/outcome.json"
TRAIN = [*TINY, "--train-iters", str(STEPS), "--eval-iters", "1"]


def contents(folder: Path) -> dict[str, str]:
    """Every file under a folder with its SHA-256, and every folder."""
    return {
        str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


class Place:
    """A working folder with data of two vocabularies and a finished run in it."""

    def __init__(self, folder: Path, template: Template) -> None:
        self.folder, self._template = folder, template

    def refused(self, *arguments: str, ranks: int = 1, variables: Variables = NONE) -> str:
        """The one line with which `pretrain.py` refuses; nothing of the folder has changed.

        Of several ranks the first says it; the others fail alike and say nothing. variables: of one rank.
        """
        line, before, after = self._refused(arguments, ranks, variables)
        assert after == before
        return line

    def refused_at_its_start(self, *arguments: str, ranks: int = 1) -> str:
        """As `refused`, of a start of `old` that goes on: its outcome is this failure, and nothing else has changed."""
        line, before, after = self._refused(arguments, ranks, NONE)
        assert before.pop(OUTCOME) != after.pop(OUTCOME) and after == before
        assert outcome(self.folder / "old") == {"outcome": "failed", "step": None, "reason": line}
        return line

    def _refused(
        self, arguments: tuple[str, ...], ranks: int, variables: Variables
    ) -> tuple[str, dict[str, str], dict[str, str]]:
        """The line, and what was in the folder before and after."""
        before = contents(self.folder)
        if ranks > 1:
            first, *others = run_ranks(ranks, *arguments, folder=self.folder, template=self._template)
        else:
            command = (sys.executable, PRETRAIN, *arguments)
            first, others = run(*command, folder=self.folder, variables=variables, template=self._template), []
        assert [(other.returncode, other.output) for other in others] == [(2, "")] * (ranks - 1)
        return one_line(first, 2), before, contents(self.folder)


def one_line(done: Finished, exit_code: int) -> str:
    assert (done.returncode, done.stdout, done.left) == (exit_code, "", []), done.output
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("error: ").rstrip("\n")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, template: Template) -> Path:
    """A folder with prepared data `byte1` (256 ids) and `char2` (21 ids), and the run `old` on the former."""
    folder = tmp_path_factory.mktemp("trained")
    corpus(folder)
    corpus(folder, seed=2, tokenizer="char")
    command = (sys.executable, PRETRAIN, *TRAIN, "--data-path", "byte1", "--save", "old")
    done = run(*command, folder=folder, template=template)
    assert (done.returncode, done.stderr) == (0, "")
    return folder


@pytest.fixture
def place(trained: Path, tmp_path: Path, template: Template) -> Place:
    """A copy that the test may damage."""
    return Place(Path(shutil.copytree(trained, tmp_path / "place")), template)


DATA = ["--data-path", "byte1"]
RESUME = ["--load", "old", "--save", "old", *DATA]
STEP_FOLDER = f"old/checkpoints/step_{STEPS:08d}"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--recipe", "enwik8-smal"], "--recipe enwik8-smal: unknown recipe; did you mean enwik8-small?"),
        (["--num-layer", "2"], "--num-layer: unknown flag; did you mean --num-layers?"),
        (
            ["--global-batch-size", "6", "--micro-batch-size", "4"],
            "--global-batch-size 6: must be a multiple of --micro",
        ),
        (
            ["--hidden-size", "30"],
            "--hidden-size 30: must be a multiple of --num-attention-heads 4; the next one is 32",
        ),
        (["--attention-dropout", "1e-5"], "--attention-dropout 1e-05: dropout has a resolution of 1/16384, at which"),
        (["--attention-backend", "flash"], "--attention-backend flash: "),
        (["--deepspeed_config", "two.json", "--zero-stage", "1"], "--zero-stage 1: two.json says stage 2; give one of"),
        (["--deepspeed_config", "broken.json"], "--deepspeed-config broken.json: is not valid JSON"),
        (["--save-interval", "5"], "--save-interval 5: has no effect without --save"),
        (["--data-path", "byte1", "--data-path", "char2"], "--data-path: given twice"),
    ],
)
def test_found_before_anything_starts(place: Place, arguments: list[str], line: str) -> None:
    (place.folder / "two.json").write_text('{"zero_optimization": {"stage": 2}}')
    (place.folder / "broken.json").write_text('{"zero_optimization": ')
    assert place.refused(*arguments).startswith(line)


@pytest.mark.parametrize(
    ("arguments", "variables", "line"),
    [
        (
            ["--tensor-model-parallel-size", "3"],
            {"WORLD_SIZE": "3"},
            "--tensor-model-parallel-size 3: must divide --num-attention-heads 4; possible are 1, 2, 4",
        ),
        (
            ["--global-batch-size", "6", "--micro-batch-size", "2"],
            {"WORLD_SIZE": "2"},
            "--global-batch-size 6: must be a multiple of 4 (2 data-parallel replicas × --micro-batch-size 2); the",
        ),
        (
            ["--tensor-model-parallel-size", "2"],
            {"WORLD_SIZE": "3"},
            "--tensor-model-parallel-size 2: 3 processes do not form replicas of 2; start 2 processes or a multiple",
        ),
        (
            ["--tensor-model-parallel-size", "2"],
            {},
            "--tensor-model-parallel-size 2: 1 process does not form a replica of 2 processes; start 2 processes or a",
        ),
    ],
)
def test_sizes_that_do_not_divide(place: Place, arguments: list[str], variables: dict[str, str], line: str) -> None:
    """Found by each process alone, before it waits for another: this one is rank 0 of a world that is not there."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"} if variables else {}
    command = [argument for argument in TRAIN if argument not in ("--global-batch-size", "4")]
    del command[command.index("--num-attention-heads") + 1 :]
    command = ["--num-attention-heads", "4", *DATA, "--save", "new", *arguments]
    assert place.refused(*command, variables=ranks | variables).startswith(line)


def test_a_backend_that_cannot_run_here(place: Place) -> None:
    """Known once the device is: triton does not run on a CPU."""
    found = place.refused(*TRAIN, *DATA, "--save", "new", "--attention-backend", "triton")
    assert found.startswith("--attention-backend triton: ")


@pytest.mark.parametrize(
    ("data_path", "line"),
    [
        ("byte2", "--data-path byte2: neither byte2.json nor byte2.bin exists; did you mean byte1?"),
        ("absent/byte1", "--data-path absent/byte1: the folder absent does not exist"),
        (".", "--data-path .: is a folder, not the prefix of token files; give a prefix in it: byte1, char2"),
        (
            "words1.txt",
            "--data-path words1.txt: is a file, but not one of prepared data; prepare it: python tools/prep",
        ),
        ("empty", "empty.idx: "),
        ("noise", "noise.idx: "),
    ],
)
def test_data_that_is_not_there_or_not_data(place: Place, data_path: str, line: str) -> None:
    for name, content in (("empty", b""), ("noise", bytes(range(256)))):
        (place.folder / f"{name}.bin").write_bytes(content)
        (place.folder / f"{name}.idx").write_bytes(content)
    kind = ["--tokenizer-type", "byte"] if data_path in ("empty", "noise") else []
    found = place.refused(*TRAIN, "--data-path", data_path, *kind, "--save", "new")
    assert line in found


def test_damaged_data(place: Place) -> None:
    with (place.folder / "byte1_train.bin").open("ab") as file:
        file.write(b"x")
    assert "byte1_train.bin" in place.refused(*TRAIN, *DATA, "--save", "new", ranks=2)


def test_more_streams_than_text(place: Place) -> None:
    line = place.refused(*DATA, "--seq-length", "2000", "--save", "new")
    assert "--seq-length" in line
    assert "2000" in line.replace(",", "")


def test_text_that_is_none(place: Place) -> None:
    """tools/prepare_data.py names the place of the first byte that cannot be."""
    (place.folder / "latin1.txt").write_bytes("one line\nund noch ein schönes Wort\n".encode("latin-1"))
    before = contents(place.folder)
    tool = str(ROOT / "tools" / "prepare_data.py")
    command = [sys.executable, tool, "byte", "--input", "words1.txt", "latin1.txt", "--output-prefix", "out/new"]
    line = one_line(run(*command, folder=place.folder), 2)
    assert line.startswith("--input latin1.txt: line 2, byte offset 25 (byte 0xf6) is not valid UTF-8")
    assert contents(place.folder) == before


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('{"gradient_clipping": 5.0}', "ds.json gradient_clipping = 5.0: contradicts 1.0 from --clip-grad; make them"),
        ('{"train_batch_size": 8}', "ds.json train_batch_size = 8: contradicts 4 from --global-batch-size"),
        ('{"bf16": {"enabled": true}}', "ds.json bf16.enabled = true: contradicts false from --bf16"),
        (
            '{"zero_optimization": {"stage": 1, "reduce_bucket_size": "x"}}',
            "ds.json zero_optimization.reduce_bucket_si",
        ),
    ],
)
def test_deepspeed_json_that_contradicts_a_flag(place: Place, content: str, line: str) -> None:
    (place.folder / "ds.json").write_text(content)
    flags = [*TRAIN, *DATA, "--deepspeed_config", "ds.json", "--tensor-model-parallel-size", "2", "--save", "new"]
    assert place.refused(*flags, ranks=2).startswith(line)


def test_port_in_use(place: Place, template: Template) -> None:
    """Not the user's doing: exit code 1. The rank that cannot know waits as long as it would for a late rank."""
    flags = [*TRAIN, *DATA, "--tensor-model-parallel-size", "2", "--distributed-timeout-minutes", "0.02"]
    before = contents(place.folder)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        first, second = run_ranks(2, *flags, "--save", "new", folder=place.folder, port=port, template=template)
    line = one_line(first, 1)
    assert line.startswith(
        f"address 127.0.0.1, port {port}: the port is in use on this host; choose another: MASTER_PO"
    )
    line = one_line(second, 1)
    assert line.startswith(f"rank 1 of 2: the ranks did not meet at 127.0.0.1:{port} within 1.2 s")
    assert contents(place.folder) == before


def test_port_in_use_under_mpirun(place: Place) -> None:
    if not (BIN / "mpirun").exists():
        pytest.skip(f"no mpirun beside this Python, {BIN}: pip install mpich")
    flags = [*TRAIN, *DATA, "--tensor-model-parallel-size", "2", "--save", "new"]
    before = contents(place.folder)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = str(stranger.getsockname()[1])
        command = [str(ROOT / "launch" / "mpirun.sh"), *flags]
        done = run(*command, folder=place.folder, variables={"NPROC": "2", "MASTER_PORT": port})
    assert done.returncode != 0 and done.left == [], done.output  # MPICH may tell how it has ended the other rank
    assert f"port {port}: the port is in use" in done.stderr.splitlines()[-1]
    assert contents(place.folder) == before


def test_save_where_a_run_is(place: Place) -> None:
    line = place.refused(*TRAIN, *DATA, "--save", "old", ranks=2)
    assert line == "--save old: holds a run already; give --load old to go on with it, or choose another folder"


@pytest.mark.parametrize("save", ["words1.txt", "words1.txt/new"])
def test_save_where_no_folder_can_be(place: Place, save: str) -> None:
    line = place.refused(*TRAIN, *DATA, "--save", save)
    assert line.startswith(f"--save {save}: cannot be written (")
    assert line.endswith("choose another folder")


def test_paths_that_there_cannot_be(place: Place) -> None:
    name = "x" * 300
    line = place.refused(*TRAIN, *DATA, "--load", name, "--save", "new", ranks=2)
    assert line.startswith("path xxx") and line.endswith(
        "x/checkpoints: File name too long; check that path, or name another"
    )


@pytest.mark.parametrize(
    ("load", "line"),
    [
        ("absent", "absent: no checkpoint to load: there is no folder absent/checkpoints; name a run folder"),
        (
            "words1.txt",
            "words1.txt: no checkpoint to load: there is no folder words1.txt/checkpoints; name a run folder",
        ),
        ("fresh", "fresh: no complete checkpoint in fresh/checkpoints; name another run folder"),
    ],
)
def test_load_without_a_checkpoint(place: Place, load: str, line: str) -> None:
    (place.folder / "fresh" / "checkpoints").mkdir(parents=True)
    assert place.refused(*TRAIN, *DATA, "--load", load, "--save", "new") == line


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("weights-00001.safetensors", flip, "damaged: expected SHA-256"),
        ("optimizer-00001.safetensors", cut, "damaged: expected"),
        ("state.json", Path.unlink, "expected a file of"),
    ],
)
def test_damaged_checkpoint(place: Place, name: str, damage: Callable[[Path], None], words: str) -> None:
    damage(place.folder / STEP_FOLDER / name)
    line = place.refused_at_its_start(*TRAIN, *RESUME)
    assert line.startswith("old: no complete checkpoint in old/checkpoints (passed over: ")
    assert f"{STEP_FOLDER}: {name}: {words}" in line


def test_checkpoints_that_have_lost_their_markers_are_not_taken_for_a_run_that_never_saved(place: Place) -> None:
    (place.folder / STEP_FOLDER / "COMPLETE").unlink()
    shutil.copytree(place.folder / STEP_FOLDER, place.folder / "old/checkpoints/step_00000001")
    line = place.refused_at_its_start(*TRAIN, *RESUME)
    assert line.startswith("old: no complete checkpoint in old/checkpoints (passed over: ")
    assert line.count("expected a file COMPLETE, found none") == 2


@pytest.mark.parametrize("name", ["latest", "pace.json"])
def test_a_folder_where_a_save_leaves_a_file(place: Place, name: str) -> None:
    path = place.folder / "old" / name
    path.unlink()
    path.mkdir()
    line = place.refused_at_its_start(*TRAIN, *RESUME)
    assert line == f"--save old: has a folder {name}, where a file is to be; remove it"


@pytest.mark.parametrize("lost", [f"{STEP_FOLDER}/COMPLETE", "old/checkpoints"])
def test_a_run_that_has_saved_is_not_begun_anew(place: Place, lost: str) -> None:
    path = place.folder / lost
    path.unlink() if path.is_file() else shutil.rmtree(path)
    assert "though old/latest names 'step_00000002'; " in place.refused_at_its_start(*TRAIN, *RESUME)


def test_a_start_that_fails_before_it_has_the_lock_leaves_no_earlier_outcome(place: Place) -> None:
    line, before, after = place._refused((*TRAIN, *RESUME, "--tensor-model-parallel-size", "2"), 1, NONE)
    assert line.startswith("--tensor-model-parallel-size 2: ")
    del before[OUTCOME]
    assert after == before


@pytest.mark.parametrize("save", ["old/checkpoints", STEP_FOLDER])
def test_a_run_within_another(place: Place, save: str) -> None:
    line = place.refused(*TRAIN, *DATA, "--save", save)
    assert re.fullmatch(
        rf"--save {save}: is a part of the run /\S+/old; name a folder outside of its checkpoints", line
    )


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (["--num-layers", "3"], f"--num-layers 3: {STEP_FOLDER} was trained with 2; resume with the same value or"),
        (["--no-adaptive-span"], f"--adaptive-span False: {STEP_FOLDER} was trained with True; resume with the same"),
        (["--lr", "0.5"], f"--lr 0.5: {STEP_FOLDER} was trained with 0.001; resume with the same value or"),
        (["--seq-length", "16"], f"--seq-length 16: {STEP_FOLDER} was trained with 32; resume with the same value or"),
    ],
)
def test_resume_with_another_model_or_schedule(place: Place, changed: list[str], line: str) -> None:
    flags = list(TRAIN)
    if changed[0] in flags:
        at = flags.index(changed[0])
        del flags[at : at + 2]
    assert place.refused_at_its_start(*flags, *changed, *RESUME).startswith(line)


def test_resume_on_data_of_another_vocabulary(place: Place) -> None:
    size = json.loads((place.folder / "char2.json").read_text())["tokenizer"]["characters"]
    line = place.refused_at_its_start(*TRAIN, "--load", "old", "--save", "old", "--data-path", "char2", ranks=2)
    assert line.startswith(
        f"--data-path char2: its vocabulary size is {len(size)}, {STEP_FOLDER} was trained with 256 "
        f"(kind char, not byte; vocabulary size {len(size)}, not 256); resume with"
    )


def test_clusters_beyond_the_vocabulary(place: Place) -> None:
    flags = ["--adaptive-cutoffs", "20,256", "--save", "new"]
    line = place.refused(*TRAIN, *DATA, *flags, ranks=2)
    assert line.startswith("--adaptive-cutoffs 20,256: each must be below the vocabulary size 256")


def test_a_plateau_without_a_validation_split(place: Place) -> None:
    """A validation split shorter than one block of every stream could never be evaluated."""
    flags = ["--lr-decay-style", "plateau", "--eval-interval", "1", "--seq-length", "1000", "--global-batch-size", "2"]
    tiny = TINY[: TINY.index("--seq-length")]
    line = place.refused(*tiny, *DATA, *flags, "--train-iters", "2", "--save", "new")
    assert line.startswith("--eval-interval 1: the valid split has ")


@pytest.mark.parametrize(("layers", "hidden"), [("2000000000", "32"), ("1", "2000000000")])
def test_weights_that_no_machine_holds(place: Place, layers: str, hidden: str) -> None:
    line = place.refused("--num-layers", layers, "--hidden-size", hidden, *TRAIN[4:], *DATA, "--save", "new")
    assert re.fullmatch(
        rf"--num-layers {layers} --hidden-size {hidden}: the weights of a rank take [\d,]+ GB in float32, and the "
        r"machine has \d+ GB; make the model smaller or raise --tensor-model-parallel-size",
        line,
    )


def test_float16_without_a_gpu(place: Place) -> None:
    line = place.refused(*TRAIN, *DATA, "--fp16", "--tensor-model-parallel-size", "2", "--save", "new", ranks=2)
    assert line == "--fp16 True: DeepSpeed trains in float16 on GPUs only; use --bf16 or neither"


@pytest.mark.faults
def test_deepspeed_launcher_passes_on_a_mistake_of_the_session(place: Place) -> None:
    launcher = ["deepspeed", "--quiet", "--num_gpus", "2", "--master_port", str(free_port()), PRETRAIN]
    before = contents(place.folder)
    done = run(*launcher, *TRAIN, *DATA, "--tensor-model-parallel-size", "2", "--save", "old", folder=place.folder)
    assert (done.returncode, done.left) == (2, [])
    assert done.stderr.startswith("error: --save old: holds a run already; ")
    assert done.stderr.count("\n") == 1
    assert contents(place.folder) == before
