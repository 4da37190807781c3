"""How continuations are shown: as text, the first as it comes, or each as a line of JSON once it is complete."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_allattn.inference.answer import Answer


@dataclass(frozen=True)
class Sample:
    """A continuation and which it is: the number of its prompt, and its own among that prompt's, from 0."""

    prompt: int
    sample: int
    answer: Answer


class Printer(Protocol):
    """Prints samples in their order while they are written side by side."""

    def show(self) -> None:
        """Print what is new since the last call."""


def write(text: str) -> None:
    """Show text at once."""
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


class TextPrinter:
    """The first sample that is not over as it comes, the next ones behind it.

    title: the line above a sample, or nothing.
    """

    def __init__(self, samples: Sequence[Sample], title: Callable[[Sample], str]) -> None:
        self._samples, self._title = samples, title
        self._number, self._printed = 0, -1  # the sample, and how much of its text; -1: nor its title

    def show(self) -> None:
        while self._number < len(self._samples):
            sample = self._samples[self._number]
            answer = sample.answer
            if self._printed < 0:
                write(self._title(sample) + answer.beginning)
                self._printed = 0
            write(answer.text[self._printed :])
            self._printed = len(answer.text)
            if answer.finish is None:
                return
            write("\n")
            self._number, self._printed = self._number + 1, -1


class JsonPrinter:
    """A line for each sample, as soon as it and those before it are over."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._left = list(samples)

    def show(self) -> None:
        while self._left and self._left[0].answer.finish is not None:
            sample = self._left.pop(0)
            answer = sample.answer
            found = {
                "prompt": sample.prompt,
                "sample": sample.sample,
                "prompt_text": answer.beginning,
                "text": answer.text,
                "tokens": answer.tokens,
                "finish": answer.finish,
                "stop": answer.stop,
            }
            write(json.dumps(found) + "\n")
