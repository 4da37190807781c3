"""Two runs on one run folder: the second is refused, whoever started it, until the first is over, however it ends."""

import signal
import sys
import time
from pathlib import Path

from tests.support.commands import PRETRAIN, TINY, Program, corpus, environment, outcome, records, run, run_ranks
from tests.support.template import Template

FLAGS = [*TINY, "--data-path", "byte1", "--eval-iters", "1", "--save", "run", "--save-interval", "5"]


def test_the_second_is_refused_until_the_first_is_gone(tmp_path: Path, template: Template) -> None:
    corpus(tmp_path)
    path = tmp_path / "run"
    begin = [sys.executable, PRETRAIN, *FLAGS]
    with Program([*begin, "--train-iters", "1000000"], tmp_path, environment(), template) as first:
        while not (path / "latest").exists():
            assert first.process.poll() is None, first.stderr
            time.sleep(0.01)
        first.process.send_signal(signal.SIGSTOP)  # it holds the lock also while it does nothing
        refused = run_ranks(2, *FLAGS, "--load", "run", "--train-iters", "3", folder=tmp_path, template=template)
        anew = run(*begin, folder=tmp_path, template=template)  # without --load
        assert first.process.poll() is None, first.stderr
        owner = (path / "lock").read_text().strip()
        assert owner.startswith(f"process {first.process.pid} on ")
        first.process.kill()
        assert first.wait().returncode == -signal.SIGKILL
        steps = [record["step"] for record in records(path)]
        assert steps == list(range(1, len(steps) + 1))
        last = str(steps[-1] + 2)
        done = run(*begin, "--load", "run", "--train-iters", last, folder=tmp_path, template=template)
    line = f"error: --save run: is in use by {owner}; wait for its end or choose another folder\n"
    assert [(one.returncode, one.output) for one in refused] == [(2, line), (2, "")]
    assert (anew.returncode, anew.output) == (2, line)
    assert (done.returncode, done.stderr) == (0, "")
    assert [r["step"] for r in records(path) if r["kind"] == "train"] == list(range(1, int(last) + 1))
    assert outcome(path)["outcome"] == "done"
    assert not (path / "lock").exists()
