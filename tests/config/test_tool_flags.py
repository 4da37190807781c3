"""A tool's own flags among pretrain.py's."""

import shlex

import pytest

from megatron_allattn.config.errors import UsageError
from megatron_allattn.config.tool_flags import ToolParser, above_zero, count, integer, number


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


def test_numbers(parser: ToolParser) -> None:
    parser.add_argument("--ids", type=integer(0, 9))
    parser.add_argument("--rate", type=number("from 0 up to, and without, 1", lambda value: 0 <= value < 1))
    found = parser.parse_args(["--nodes", "1", "--ids", "0", "--rate", "0.5"])
    assert (found.nodes, found.ids, found.rate) == (1, 0, 0.5)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--nodes 0", r"'0': must be an integer from 1 to 2147483647"),
        ("--nodes 2147483648", r"must be an integer from 1 to"),
        ("--nodes ٣", r"must be an integer from 1 to"),  # a digit, but not one of ours
        ("--nodes 1e3", r"must be an integer from 1 to"),
        ("--rate 0", r"'0': must be a number above 0; see --help"),
        ("--rate inf", r"must be a number above 0"),
        ("--rate nan", r"must be a number above 0"),
        ("--rate fast", r"must be a number above 0"),
        ("--nodes 1 --nodes 2", r"^flag --nodes: is given twice; give it once$"),
        ("--job_name a --job-name b", r"^flag --job-name: is given twice; give it once$"),
        ("--files a --files b", r"^flag --files: is given twice; give it once, with all its values$"),
        ("--node 1", r"^flag --node: is unknown; did you mean --nodes\?$"),
    ],
)
def test_what_is_refused(parser: ToolParser, words: str, told: str) -> None:
    parser.add_argument("--rate", type=above_zero)
    parser.add_argument("--files", nargs="+")
    with pytest.raises(UsageError, match=told):
        parser.parse_args(words.split())


def test_what_was_given(parser: ToolParser) -> None:
    parser.parse_args(["--job_name=nodes", "--nodes", "1"])
    assert parser.given == {"--job-name", "--nodes"}
