"""A tool's own flags among pretrain.py's."""

import shlex

import pytest

from megatron_allattn.config.tool_flags import ToolParser, count


@pytest.fixture
def parser() -> ToolParser:
    made = ToolParser("tool.py", "A tool.")
    made.add_argument("--nodes", type=count)
    made.add_argument("--job-name")
    made.add_argument("--submit", action="store_true")
    return made


@pytest.mark.parametrize(
    ("given", "own", "others"),
    [
        ("--nodes 2 --lr 0.1 --submit --save run", "--nodes 2 --submit", "--lr 0.1 --save run"),
        ("--lr 0.1 --job_name=a=b --nodes=2", "--job_name=a=b --nodes=2", "--lr 0.1"),
        ("--submit word --job-name --lr", "--submit --job-name --lr", "word"),  # a value, whatever it looks like
        ("--lr -1 --job-name -1 -h", "--job-name -1 -h", "--lr -1"),
        ("--node 2 --submit-it --save=--nodes", "", "--node 2 --submit-it --save=--nodes"),  # nothing is abbreviated
        ("--save run --nodes", "--nodes", "--save run"),
        ("", "", ""),
    ],
)
def test_the_split_of_words(parser: ToolParser, given: str, own: str, others: str) -> None:
    assert parser.split(shlex.split(given)) == (shlex.split(own), shlex.split(others))


def test_what_is_split_off_is_read(parser: ToolParser) -> None:
    own, _ = parser.split(["--job_name=a=b", "--lr", "1", "--nodes", "3"])
    assert vars(parser.parse_args(own)) == {"nodes": 3, "job_name": "a=b", "submit": False}
