"""Batch scripts: what is filled in, what is refused, and those that are shipped."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron_allattn.cluster.jobs.arguments import submitted
from megatron_allattn.cluster.jobs.margin import DEFAULT, seconds
from megatron_allattn.cluster.jobs.script import JobOptions, job_text, write_job
from megatron_allattn.config import RECIPES, UsageError, check_world, load_deepspeed_json, parse
from tests.support.commands import ROOT

LAUNCH = ROOT / "launch"
SHIPPED = [LAUNCH / "pretrain.sbatch", *sorted((LAUNCH / "recipes").glob("*.sbatch"))]
EIGHT = JobOptions(nodes=8, gpus_per_node=8)


def options_of(text: str) -> dict[str, str]:
    """The options of sbatch in a script."""
    lines = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def arguments_of(text: str, *given: str) -> list[str]:
    """What bash makes of the line with the arguments."""
    (line,) = [line for line in text.split("\n") if line.startswith("arguments=(")]
    script = f'{text[text.index(line) :].partition(chr(10) + "root=")[0]}\nprintf "%s\\0" "${{arguments[@]}}"'
    done = subprocess.run(["bash", "-c", script, "bash", *given], capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


def test_the_template_asks_for_the_default_job() -> None:
    assert options_of(job_text([], EIGHT)) == options_of((LAUNCH / "pretrain.sbatch").read_text())


def test_what_a_job_asks_for(tmp_path: Path) -> None:
    options = JobOptions(
        nodes=4,
        gpus_per_node=2,
        spare_nodes=1,
        cpus_per_task=3,
        time="2-12",
        signal_seconds=900,
        job_name="large",
        partition="gpu,long",
        exclude="n[1-2]",
        constraint="a100&ib",
    )
    path = write_job(tmp_path, ["--recipe", "enwik8-large", "--save", "a 'b'\n$c"], options)
    text = path.read_text()
    assert path == tmp_path / "job.sbatch" and path.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    assert options_of(text) == {
        "job-name": "large",
        "nodes": "5",
        "ntasks-per-node": "2",
        "gpus-per-node": "2",
        "cpus-per-task": "3",
        "exclusive": "",
        "mem": "0",
        "time": "2-12",
        "signal": "B:USR1@900",
        "requeue": "",
        "open-mode": "append",
        "output": "%x-%j.out",
        "partition": "gpu,long",
        "exclude": "n[1-2]",
        "constraint": "a100&ib",
    }
    assert "\nSPARE_NODES=1\n" in text and f"\nroot={ROOT}\n" in text
    assert arguments_of(text) == ["--recipe", "enwik8-large", "--save", "a 'b'\n$c"]
    assert arguments_of(text, "--bf16") == ["--recipe", "enwik8-large", "--save", "a 'b'\n$c", "--bf16"]
    first = next(number for number, line in enumerate(text.split("\n")) if line and not line.startswith("#"))
    assert all(not line.startswith("#SBATCH") for line in text.split("\n")[first:])  # sbatch reads none after a command


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 0}, "--nodes 0: must be a whole number from 1 on"),
        ({"spare_nodes": -1}, "--spare-nodes -1: must be a whole number from 0 on"),
        ({"partition": "gpu --wrap=x"}, "--partition gpu --wrap=x: must be one word"),
        ({"account": "a\n#SBATCH --uid=0"}, "must be one word"),
        ({"job_name": "$(id)"}, "--job-name $(id): must be one word"),
        ({"job_name": "runs/x"}, "--job-name runs/x: is part of the output file's name; leave / and % out"),
        ({"qos": "-x"}, "--qos -x: must be one word"),
        ({"exclude": ""}, "--exclude '': must be one word"),
        ({"time": "soon"}, "--time soon: is no time as sbatch takes it"),
        ({"time": "11"}, "--time 11: is 660 s, and the job would be told to stop 660 s before its end"),
    ],
)
def test_bad_options(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as error:
        JobOptions(**({"nodes": 8, "gpus_per_node": 8} | changes))  # type: ignore[arg-type]
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("time", "expected"),
    [("90", 5400), ("90:30", 5430), ("1:02:03", 3723), ("2-12", 216_000), ("2-12:30", 217_800), ("1-0:0:1", 86_401)],
)
def test_times_as_sbatch_takes_them(time: str, expected: int) -> None:
    assert seconds(time) == expected


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_scripts_ask_for_what_they_need(path: Path) -> None:
    found = options_of(path.read_text())
    assert found["signal"] == f"B:USR1@{DEFAULT}" and found["open-mode"] == "append" and "requeue" in found
    assert found["ntasks-per-node"] == found["gpus-per-node"]
    assert seconds(found["time"]) > 2 * DEFAULT
    assert path.stat().st_mode & 0o111


def submitted_by(path: Path, tmp_path: Path, *given: str, **variables: str) -> list[str]:
    """The arguments with which a shipped script hands over to pretrain.sbatch."""
    (tmp_path / "launch").mkdir(exist_ok=True)
    (tmp_path / "launch/pretrain.sbatch").write_text('printf "%s\\0" "$@"\n')
    env = {"PATH": "/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(tmp_path), **variables}
    done = subprocess.run(["bash", str(path), *given], env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().split("\0")[:-1]


def check_divides(path: Path, arguments: list[str]) -> str:
    """The recipe, once the run divides over the processes that the script asks for."""
    found = options_of(path.read_text())
    run, _ = parse(arguments)
    world_size = int(found["nodes"]) * int(found["ntasks-per-node"])
    check_world(run, world_size)
    load_deepspeed_json(run, world_size)
    assert run.recipe is not None
    return run.recipe


@pytest.mark.parametrize("path", SHIPPED[1:], ids=lambda path: path.stem)
def test_recipes_parse_and_divide(path: Path, tmp_path: Path) -> None:
    arguments = submitted_by(path, tmp_path, "--seed", "7")
    assert check_divides(path, arguments) == path.stem
    assert arguments[-2:] == ["--seed", "7"]
    text = path.read_text()
    prepare = RECIPES[path.stem].prepare.replace("--input FILE", "--input TEXT_FILES")
    data = RECIPES[path.stem]().data.data_path
    assert f"#   python tools/prepare_data.py {prepare} --output-prefix {data}\n" in text
    millions = RECIPES[path.stem].paper_millions
    assert millions is None or f"({millions}M parameters)" in text


def test_the_comments_commands_are_right() -> None:
    """Those of pretrain.sbatch name its options and a recipe."""
    text = (LAUNCH / "pretrain.sbatch").read_text()
    lines = re.findall(r"^#   sbatch (.*)$", text, re.M)
    assert len(lines) == 3
    for line in lines:
        words = shlex.split(line.split("  #")[0].replace("…", "--save /shared/x"), comments=True)
        at = words.index("launch/pretrain.sbatch")
        names = {word.removeprefix("--").partition("=")[0] for word in words[:at]}
        assert names <= {*options_of(text), "export"}
        assert submitted(words[at + 1 :]).run.checkpoint.save is not None
