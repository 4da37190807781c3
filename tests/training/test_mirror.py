"""Sinks that fail, stand still, do not start or do not end: told, with how many records, and training does not wait."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_allattn.training.metrics import Metrics
from megatron_allattn.training.mirror import Mirror, Record, Sink
from tests.support.commands import ROOT, run

RECORDS = [{"kind": "train", "step": step, "loss": 1 / step} for step in range(1, 9)]


class Kept(Sink):
    """Keeps what it gets; fails at `fails`, stands still at `stands` (a name or a step) until it is let go."""

    note = "kept in memory"

    def __init__(self, fails: int | str = "", stands: int | str = "", go: threading.Event | None = None) -> None:
        self.fails, self.stands, self.go = fails, stands, go or threading.Event()
        self.standing = threading.Event()
        self.got: list[Record] = []
        self.told: list[str] = []

    def opened(self) -> "Kept":
        self._at("open")
        return self

    def _at(self, place: int | str) -> None:
        self.told.append(str(place))
        if place == self.stands:
            self.standing.set()
            assert self.go.wait(60)
        if place == self.fails:
            raise ConnectionError("network is\nunreachable")

    def catch_up(self, path: Path, size: int) -> None:
        self.told.append(f"caught up with {path.read_bytes()[:size].decode()!r}")

    def write(self, record: Record) -> None:
        self._at(record["step"])
        self.got.append(record)

    def flush(self) -> None:
        self._at("flush")

    def close(self) -> None:
        self._at("close")


@pytest.fixture
def go() -> Iterator[threading.Event]:
    """Lets sinks go on that stand still, at the latest when a test is over."""
    event = threading.Event()
    yield event
    event.set()


def mirror_of(sink: Kept, capacity: int = 100) -> Mirror:
    return Mirror("sink", sink.opened, capacity)


def test_records_come_in_order_before_it_is_closed_once(capsys: pytest.CaptureFixture[str]) -> None:
    sink = Kept()
    mirror = mirror_of(sink)
    mirror.wait_until_open(60)
    assert mirror.note == "kept in memory"
    for record in RECORDS:
        mirror.put(record)
    mirror.close(60)
    mirror.close(60)
    assert sink.got == RECORDS
    assert sink.told[-1] == "close" and sink.told.count("close") == 1
    assert capsys.readouterr() == ("", "")


def test_it_is_flushed_when_nothing_waits() -> None:
    sink = Kept(stands="flush")
    mirror = mirror_of(sink)
    mirror.put(RECORDS[0])
    assert sink.standing.wait(60)
    assert sink.got == RECORDS[:1]
    sink.go.set()
    mirror.close(60)


def test_one_that_fails_is_told_once_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sink, other = Kept(fails=3), Kept()
    metrics = Metrics(tmp_path, [mirror_of(sink), mirror_of(other)])
    for record in RECORDS:
        metrics.write(record)
        time.sleep(0.01)
    metrics.close(60)
    assert sink.got == RECORDS[:2] and sink.told.count("3") == 1 and "4" not in sink.told
    assert other.got == RECORDS
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == RECORDS
    assert capsys.readouterr() == ("", "warning: sink failed and gets no more records (network is unreachable)\n")


def test_one_that_fails_at_the_end_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    mirror = mirror_of(Kept(fails="close"))
    mirror.put(RECORDS[0])
    mirror.close(60)
    assert capsys.readouterr().err.count("warning: sink failed") == 1


def test_one_that_stands_still_holds_up_nothing(go: threading.Event, capsys: pytest.CaptureFixture[str]) -> None:
    sink = Kept(stands=2, go=go)
    mirror = mirror_of(sink, capacity=3)
    mirror.put(RECORDS[0])
    mirror.put(RECORDS[1])
    assert sink.standing.wait(60)
    began = time.monotonic()
    for record in RECORDS[2:]:
        mirror.put(record)
    assert time.monotonic() - began < 1
    stands = "warning: sink stands still, 3 records wait: those that find no room are dropped\n"
    assert capsys.readouterr().err == stands
    began = time.monotonic()
    mirror.close(0.3)
    assert 0.2 < time.monotonic() - began < 5
    lost = "3 records were dropped, up to 3 more if it does not go on; metrics.jsonl has them"
    assert capsys.readouterr().err == f"warning: sink has not ended within 0.3 s: {lost}\n"
    assert sink.got == RECORDS[:1]


def test_one_that_goes_on_says_how_many_it_lacks(go: threading.Event, capsys: pytest.CaptureFixture[str]) -> None:
    sink = Kept(stands=1, go=go)
    mirror = mirror_of(sink, capacity=2)
    mirror.put(RECORDS[0])
    assert sink.standing.wait(60)
    for record in RECORDS[1:]:
        mirror.put(record)
    go.set()
    mirror.close(60)
    assert sink.got == RECORDS[:3]
    first, last = capsys.readouterr().err.splitlines()
    assert "stands still" in first and last == "warning: sink 5 records were dropped; metrics.jsonl has them"


def test_one_that_cannot_be_opened_raises_what_it_raises() -> None:
    mirror = mirror_of(Kept(fails="open"))
    with pytest.raises(ConnectionError, match="unreachable"):
        mirror.wait_until_open(60)
    mirror.put(RECORDS[0])
    mirror.close(60)


@pytest.mark.parametrize("fails", ["", "open"])
def test_one_that_does_not_start_gets_its_records_later(
    go: threading.Event, fails: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = Kept(fails=fails, stands="open", go=go)
    mirror = mirror_of(sink)
    mirror.wait_until_open(0.1)
    mirror.put(RECORDS[0])
    go.set()
    mirror.close(60)
    told = ["warning: sink has not started within 0.1 s: the run goes on, its records wait for it"]
    told += ["warning: sink failed and gets no records (network is unreachable)"] if fails else []
    assert capsys.readouterr().err.splitlines() == told
    assert sink.got == ([] if fails else RECORDS[:1])


def test_it_catches_up_with_what_was_there_then(tmp_path: Path, go: threading.Event) -> None:
    sink = Kept(stands="open", go=go)
    metrics = Metrics(tmp_path, [mirror_of(sink)])
    metrics.go_on()
    metrics.write({"kind": "a", "step": 1})
    metrics.go_on()
    metrics.write({"kind": "b", "step": 2})
    go.set()
    metrics.close(60)
    assert sink.told.index("1") < sink.told.index('caught up with \'{"kind": "a", "step": 1}\\n\'')
    assert len([text for text in sink.told if text.startswith("caught")]) == 1
    assert [record["kind"] for record in sink.got] == ["a", "b"]


def test_a_process_ends_beside_one_that_never_does(tmp_path: Path) -> None:
    """Its exit handler stands still as well, as that of W&B does then."""
    program = tmp_path / "program.py"
    program.write_text(
        "import atexit, time\n"
        "from megatron_allattn.config import reporting\n"
        "from megatron_allattn.training.mirror import Mirror\n"
        "reporting.EXIT_SECONDS = 0.5\n"
        "def opener():\n"
        "    atexit.register(time.sleep, 200)\n"
        "    time.sleep(200)\n"
        "def main():\n"
        "    mirror = Mirror('sink', opener)\n"
        "    mirror.wait_until_open(0.2)\n"
        "    mirror.close(0.2)\n"
        "    return 3\n"
        "reporting.run_program(main)\n"
    )
    began = time.monotonic()
    done = run("python", str(program), folder=ROOT, variables={"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.left) == (3, [])
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["warning", "warning"]
    assert time.monotonic() - began < 60
