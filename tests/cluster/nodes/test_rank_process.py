"""A rank as a child of launch/rank.py, a launcher as a child of launch/launcher.py: streams, arguments, signals, ends.

The launcher is a shell script here, so that each takes a fraction of a second; test_launchers.py has the real ones.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from megatron_allattn.cluster.nodes.launching import last_words
from megatron_allattn.cluster.nodes.rank_process import KEPT_LINES, Collector, Ended
from tests.support.commands import MARK, ROOT, Finished, Program, environment, marked, run

RANK, LAUNCHER = str(ROOT / "launch" / "rank.py"), str(ROOT / "launch" / "launcher.py")

# Each rank behaves as `RANK:WHAT` among its arguments says; without that it waits for a minute, or for a signal.
SCRIPT = r"""
import json, os, signal, sys, time
rank = os.environ["RANK"]
what = dict(word.split(":") for word in sys.argv[1:] if ":" in word).get(rank, "wait")
def tell(line):
    os.write(1, f"{line}\n".encode())  # at once: ranks share the file
def stop(number, frame):
    tell(f"got {signal.Signals(number).name}")
    sys.exit(3)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, stop)
tell(f"rank {rank} is here")
open(f"here_{rank}", "w").close()
while what != "wait" and not (os.path.exists("here_0") and os.path.exists("here_1")):
    time.sleep(0.02)
if what == "raise":
    raise ValueError("this is it")
if what == "exit5":
    sys.exit(5)
if what == "kill":
    print("dying")
    os.kill(os.getpid(), signal.SIGKILL)
if what == "done":
    sys.exit(0)
if what == "silent":
    os.write(int(os.environ["ALLATTN_ENDS_FOR_ANOTHER"]), b".")
    sys.exit(1)
time.sleep(60)
"""
# Starts two ranks and, as launchers do, ends the other when one has failed; its own code is that of the first, or 0.
STARTS = """
for rank in 0 1; do RANK=$rank python {rank} "$0" "$@" & pids="$pids $!"; done
trap 'stopped=1; kill -TERM $pids' TERM
trap 'stopped=1; kill -USR1 $pids' USR1
wait -n; code=$?
for pid in $pids; do [ -z "$stopped" ] || {{ wait $pid; code=$?; }}; done
{after}
kill $pids 2>/dev/null; wait
echo the launcher has words of its own >&2
exit {code}
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def starts(code: str = "$code", after: str = "") -> list[str]:
    return ["bash", "-c", STARTS.format(rank=RANK, code=code, after=after)]


def launch(script: str, *arguments: str, code: str = "$code", after: str = "") -> Finished:
    return run(sys.executable, LAUNCHER, *starts(code, after), script, *arguments, folder=Path(script).parent)


@pytest.mark.parametrize(
    ("what", "how", "words"),
    [
        ("raise", "ended with exit code 1", "ValueError: this is it"),
        ("exit5", "ended with exit code 5", "is here"),
        ("kill", "was killed by SIGKILL", "dying"),
    ],
)
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.cluster), 1])
def test_the_last_lines_of_the_rank_that_failed_come_last(
    script: str, rank: int, what: str, how: str, words: str
) -> None:
    done = launch(script, f"{rank}:{what}")
    expected = {"raise": 1, "exit5": 5, "kill": 128 + signal.SIGKILL}[what]
    assert (done.returncode, done.left) == (expected, [])
    lines = done.stderr.splitlines()
    begin = lines.index(next(line for line in lines if line.startswith("launch: ")))
    assert lines[begin - 1] == "the launcher has words of its own"
    assert lines[begin].startswith(f"launch: rank {rank} on ") and how in lines[begin]
    assert lines[begin + 1] == f"  | rank {rank} is here" and words in lines[-1]
    assert "\x1e" not in done.output
    assert (f"rank {rank} is here" in done.stdout and "dying" in done.stdout) or what != "kill"


def test_a_launcher_that_returns_0_although_a_rank_has_failed(script: str) -> None:
    assert launch(script, "1:raise", code="0").returncode == 1


def test_success_is_silent(script: str) -> None:
    done = launch(script, "0:done", "1:done", code="0", after="wait")
    assert (done.returncode, done.left) == (0, [])
    assert done.stderr == "the launcher has words of its own\n"
    assert sorted(done.stdout.splitlines()) == ["rank 0 is here", "rank 1 is here"]


def test_a_rank_that_ends_because_of_another_is_not_the_one_to_show(script: str) -> None:
    done = launch(script, "0:silent", "1:wait")
    assert "launch: rank 1 on" in done.stderr and done.stderr.endswith("  | got SIGTERM\n")
    collector = Collector()
    ends = [
        Ended(0, 4, "a", 1, True, False, ""),
        Ended(3, 4, "a", 1, False, True, "z"),
        Ended(1, 4, "b", 1, False, False, "x"),
        Ended(2, 4, "c", 1, False, False, "y"),
    ]
    firsts = []
    for one in ends:
        for line in one.lines():
            assert collector.take(line)
        firsts.append(collector.first())
    assert firsts == [ends[0], ends[1], ends[2], ends[2]]
    first = firsts[-1]
    assert first is not None
    assert last_words(first).splitlines() == [
        "launch: rank 1 on b ended with exit code 1, before the others; its last lines:",
        "  | x",
    ]


def test_marked_lines_survive_prefixes_and_other_lines_between_them() -> None:
    ended = Ended(3, 4, "n1", -9, False, False, "\n".join(f"line {number} é \x1b[2J" for number in range(400)))
    lines = ended.lines()
    assert len(lines) > 2 and all(len(line) < 4096 for line in lines)
    collector = Collector()
    for line in lines:
        assert not collector.take("n2: another line\n")
        assert collector.take(f"n1: {line}")
    assert collector.ended == [ended]
    assert collector.take("\x1erank-ended nonsense\x1e") and collector.ended == [ended]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_signals_reach_the_ranks_once(script: str, name: str) -> None:
    env = environment()
    with Program([sys.executable, LAUNCHER, *starts(), script], Path(script).parent, env) as program:
        _until(lambda: program.stdout.count("is here") == 2)
        program.process.send_signal(signal.Signals[name])
        done = program.wait(60)
    assert done.stdout.count(f"got {name}") == 2
    assert (done.returncode, done.left) == (3, [])
    assert done.stderr.splitlines()[-1] == "launch: the ranks have stopped as they were asked to, with exit code 3"


def test_usr1_as_sigterm_for_launchers_that_die_of_it(script: str) -> None:
    env = environment()
    command = [sys.executable, LAUNCHER, "--signal=USR1:TERM", *starts(), script]
    with Program(command, Path(script).parent, env) as program:
        _until(lambda: program.stdout.count("is here") == 2)
        program.process.send_signal(signal.SIGUSR1)
        assert program.wait(60).stdout.count("got SIGTERM") == 2


def test_ranks_of_a_launcher_that_was_killed_are_asked_to_stop(script: str) -> None:
    """kill -9 of the launcher itself: its ranks become children of launcher.py, which ends them and waits."""
    env = environment()
    with Program([sys.executable, LAUNCHER, *starts(), script], Path(script).parent, env) as program:
        _until(lambda: program.stdout.count("is here") == 2)
        shell = next(pid for pid in marked(env[MARK]) if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"bash"))
        os.kill(shell, signal.SIGKILL)
        done = program.wait(60)
    assert done.stdout.count("got SIGTERM") == 2
    assert (done.returncode, done.left) == (128 + signal.SIGKILL, [])


def test_ranks_of_a_launcher_py_that_was_killed_stop(script: str, tmp_path: Path) -> None:
    """kill -9 of launcher.py: nobody reads the ranks' output any more, upon which they get SIGHUP."""
    noted = tmp_path / "noted"
    text = SCRIPT.replace('tell(f"got {signal.Signals(number).name}")', 'open("noted", "a").write(f"{number} ")')
    assert text != SCRIPT
    Path(script).write_text(text)
    env = environment()
    with Program([sys.executable, LAUNCHER, *starts(), script], tmp_path, env) as program:
        _until(lambda: program.stdout.count("is here") == 2)
        program.process.kill()
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # as under nohup: then it is SIGTERM
        expected = int(signal.SIGTERM if ignored else signal.SIGHUP)
        _until(lambda: noted.exists() and len(noted.read_text().split()) == 2)  # the shell may end the second one
        assert int(noted.read_text().split()[0]) == expected


def test_a_rank_whose_rank_py_is_killed_dies_too(script: str) -> None:
    env = environment({"RANK": "0"})
    with Program([sys.executable, RANK, script], Path(script).parent, env) as program:
        _until(lambda: "is here" in program.stdout)
        program.process.kill()
        assert program.wait(60).left == []


def test_arguments_streams_and_exit_code_are_the_scripts(tmp_path: Path) -> None:
    script = tmp_path / "echo.py"
    script.write_text(
        "import json, sys\nprint(json.dumps(sys.argv[1:]))\nprint('to stderr', file=sys.stderr)\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    nasty = [
        "0",
        "",
        " ",
        "a b",
        "'",
        '"',
        "$(touch canary)",
        "`id`",
        "line\nbreak\n",
        "é ü",
        "%h",
        "*",
        "-x",
        "--",
        "\udcff",
    ]
    done = run(sys.executable, RANK, str(script), *nasty, folder=tmp_path)
    assert (done.returncode, json.loads(done.stdout), done.stderr) == (0, nasty, "to stderr\n")
    done = run(sys.executable, RANK, "--local_rank=1", str(script), "0", "x", folder=tmp_path)
    assert done.returncode == 1 and "invalid literal" in done.stderr  # DeepSpeed's flag stands behind the script's name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["echo.py"]
    assert run(sys.executable, RANK, folder=tmp_path).returncode == 2
    assert run(sys.executable, LAUNCHER, "no-such-launcher", folder=tmp_path).returncode == 2


def test_only_the_last_lines_are_kept(tmp_path: Path) -> None:
    script = tmp_path / "much.py"
    script.write_text("for number in range(100_000):\n    print(number)\nraise SystemExit(1)\n")
    command = ["bash", "-c", f'RANK=0 python {RANK} "$0"']
    done = run(sys.executable, LAUNCHER, *command, str(script), folder=tmp_path)
    assert done.stdout.splitlines() == [str(number) for number in range(100_000)]
    assert done.stderr.splitlines()[1:] == [f"  | {number}" for number in range(100_000 - KEPT_LINES, 100_000)]


def _until(true: object, seconds: float = 60.0) -> None:
    assert callable(true)
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("ends", "stopped"),
    [
        ([(0, 3, True), (1, 3, True)], True),
        ([(0, 3, False), (1, 3, False)], True),  # by a signal to the ranks themselves
        ([(1, 3, True)], True),  # what the other said is lost with its host
        ([(1, 3, False)], False),  # by itself
        ([(1, 3, False), (0, -15, True)], False),
        ([(1, 3, True), (0, 1, False)], False),
    ],
)
def test_who_has_stopped_as_asked(ends: list[tuple[int, int, bool]], stopped: bool) -> None:
    collector = Collector()
    for rank, code, signalled in ends:
        assert all(collector.take(line) for line in Ended(rank, 2, "n1", code, False, signalled, "").lines())
    assert collector.stopped() == stopped
