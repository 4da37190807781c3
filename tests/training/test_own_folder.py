"""What the folder of --save holds when a run begins: nothing, a run, or what is left of a start."""

import socket
import threading
from pathlib import Path

import pytest

from megatron_allattn.config import UsageError, parse
from megatron_allattn.training.own_folder import check_own_folder, look_for


def check(save: Path, *flags: str) -> None:
    check_own_folder(parse(["--save", str(save), *flags])[0])


def test_a_start_that_came_to_nothing_leaves_no_run(tmp_path: Path) -> None:
    check(tmp_path / "run")
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    check(tmp_path / "run")
    check(tmp_path / "run", "--load", str(tmp_path / "other"))


@pytest.mark.parametrize(
    "left", ["metrics.jsonl", "latest", "checkpoints/.step_00000010.tmp-5", "checkpoints/step_00000010"]
)
def test_a_run_is_not_begun_in_anothers_folder(tmp_path: Path, left: str) -> None:
    run = tmp_path / "run"
    (run / left).mkdir(parents=True)
    for flags in ((), ("--load", str(tmp_path / "other"))):
        with pytest.raises(UsageError, match=f"--save {run}: holds a run already; give --load {run}"):
            check(run, *flags)


def test_a_folder_must_be_seen_and_written_by_every_rank(tmp_path: Path) -> None:
    sign = tmp_path / "run/checkpoints/sign"
    place = f"rank 3 on {socket.gethostname()}"
    with pytest.raises(UsageError) as error:
        look_for(sign, tmp_path / "run", 3, 0.3)
    told = f"is not the folder of rank 0 on {place}: a file made there is not seen after 0.3 s"
    fix = "name a folder that every host sees, and may write"
    assert str(error.value) == f"--save {tmp_path}/run: {told}; {fix}"

    def come() -> None:
        sign.parent.mkdir(parents=True)
        sign.touch()

    threading.Timer(0.3, come).start()
    look_for(sign, tmp_path / "run", 3, 60.0)
    assert [path.name for path in sign.parent.iterdir()] == ["sign"]
    sign.with_name("sign-3").mkdir()
    with pytest.raises(UsageError, match=f"cannot be written by {place} \\(Is a directory\\)"):
        look_for(sign, tmp_path / "run", 3, 60.0)
