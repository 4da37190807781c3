"""How the tools and launch/submit.py read their flags: strictly, told in one line, and beside those of pretrain.py.

`add_rank_flags`, and what reads those, are of tools that load a checkpoint and run as ranks of a launcher.
"""

import argparse
import difflib
import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Literal, NoReturn

from megatron_allattn.config.checks import LARGEST, check_text
from megatron_allattn.config.errors import UsageError, usage_error
from megatron_allattn.config.run import ParallelConfig

Precision = Literal["float32", "bfloat16", "float64"]


class ToolParser(argparse.ArgumentParser):
    """argparse with one-line errors, whose flags are given at most once and never abbreviated, with - or _.

    repeatable: those that may be given more often. After `parse_args`, `given` has those that were given, with -.
    """

    def __init__(self, name: str, description: str | None, repeatable: Collection[str] = ()) -> None:
        self._repeatable = repeatable
        self.given: set[str] = set()
        super().__init__(
            prog=name,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see --help")

    def parse_args(self, argv: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        words, self.given = [], set()
        for word in argv:
            name, equals, value = word.partition("=")
            if word.startswith("--"):
                name = name.replace("_", "-")
                if name not in self._option_string_actions:
                    near = difflib.get_close_matches(name, self._option_string_actions, n=1)
                    raise usage_error("flag", name, "is unknown", f"did you mean {near[0]}?" if near else "see --help")
                if name in self.given and name not in self._repeatable:
                    all_of_it = ", with all its values" if self._option_string_actions[name].nargs == "+" else ""
                    raise usage_error("flag", name, "is given twice", f"give it once{all_of_it}")
                self.given.add(name)
            words.append(name + equals + value)
        options = super().parse_args(words)
        for value in vars(options).values():
            if isinstance(value, Path):
                check_text(str(value))
        return options

    def split(self, argv: Sequence[str]) -> tuple[list[str], list[str]]:
        """The flags of this parser with their values, and all other words: pretrain.py's arguments."""
        own: list[str] = []
        others: list[str] = []
        rest = list(argv)
        while rest:
            word = rest.pop(0)
            name, equals, _ = word.partition("=")
            action = self._option_string_actions.get(name.replace("_", "-") if name.startswith("--") else name)
            (others if action is None else own).append(word)
            if action is not None and not equals and action.nargs != 0 and rest:
                own.append(rest.pop(0))
        return own, others

    def add_rank_flags(self) -> None:
        """The layout, the precision, and what launchers add."""
        add, size = self.add_argument, "--tensor-model-parallel-size"
        add(size, type=count, default=1, metavar="N", help="processes that share the heads (default 1)")
        add(
            "--distributed-timeout-minutes",
            type=float,
            default=10.0,
            metavar="T",
            help="how long a process waits for another (default 10)",
        )
        add("--bf16", action="store_true", help="compute in bfloat16 instead of float32")
        add("--float64", action="store_true", help="compute in float64 instead of float32")
        add("--local-rank", type=int, help=argparse.SUPPRESS)  # ranks are found by the environment
        add("--deepspeed", action="store_true", help=argparse.SUPPRESS)


def integer(least: int, most: int = LARGEST) -> Callable[[str], int]:
    """What reads a flag's integer from `least` to `most`."""

    def read(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text!r}: must be an integer from {least} to {most}")
        return int(text)

    return read


def number(rule: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """What reads a flag's finite number. rule: which it may be, in words; fits: whether it is one of those."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and fits(value)):
            raise argparse.ArgumentTypeError(f"{text!r}: must be a number {rule}")
        return value

    return read


count = integer(1)
above_zero = number("above 0", lambda value: value > 0)


def precision_of(given: argparse.Namespace) -> Precision:
    """What `add_rank_flags` was told of the precision. Raises UsageError."""
    if given.bf16 and given.float64:
        raise usage_error("--bf16", "--float64", "there is one precision", "give one of the two")
    return "bfloat16" if given.bf16 else "float64" if given.float64 else "float32"


def parallel_of(given: argparse.Namespace) -> ParallelConfig:
    """What `add_rank_flags` was told of the layout. Raises UsageError."""
    return ParallelConfig(
        tensor_model_parallel_size=given.tensor_model_parallel_size,
        distributed_timeout_minutes=given.distributed_timeout_minutes,
    )
