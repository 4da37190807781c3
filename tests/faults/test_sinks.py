"""W&B that stands still, at its start, a record or its end, and its exit handler with it: the run is done."""

import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import PRETRAIN, TINY, corpus, outcome, records, run
from tests.support.template import Template

pytestmark = pytest.mark.faults
WANDB = """
import atexit, os, time

PLACE = os.environ["STANDS_AT"]


def stand(place):
    if place == PLACE:
        atexit.register(time.sleep, 1000)
        time.sleep(1000)


class Settings:
    def __init__(self, **_):
        pass


class Run:
    id, dir, url = "x", "wandb/offline-run-x/files", None

    def log(self, values, step):
        stand("log")

    def finish(self):
        stand("finish")


def init(**_):
    stand("init")
    return Run()
"""


@pytest.mark.parametrize(
    ("place", "warnings"),
    [
        ("init", ["has not started within 1.5 s", "has not ended within 30 s"]),
        ("log", ["has not ended within 30 s"]),
        ("finish", ["has not ended within 30 s"]),
    ],
)
def test_a_run_beside_wandb_that_stands_still(
    tmp_path: Path, template: Template, place: str, warnings: list[str]
) -> None:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "wandb.py").write_text(WANDB)
    flags = [*TINY, "--data-path", str(corpus(tmp_path)), "--save", "run", "--train-iters", "5"]
    flags += ["--wandb-project", "p", "--distributed-timeout-minutes", "0.05"]
    variables = {"STANDS_AT": place, "PYTHONPATH": str(tmp_path / "fake")}
    began = time.monotonic()
    done = run(sys.executable, PRETRAIN, *flags, folder=tmp_path, variables=variables, template=template)
    assert (done.returncode, done.left) == (0, []), done.output
    assert time.monotonic() - began < 240
    told = [line for line in done.stderr.splitlines() if line.startswith("warning: wandb")]
    assert [line[len("warning: wandb ") :].partition(":")[0] for line in told] == warnings
    assert [record["step"] for record in records(tmp_path / "run") if record["kind"] == "train"] == [1, 2, 3, 4, 5]
    assert outcome(tmp_path / "run")["outcome"] == "done"
