"""One continuation as it grows: its tokens, its text, and why it ends.

A function of the tokens alone, so every rank, and every batch, ends it at the same one.
"""

from collections.abc import Sequence
from typing import Literal

from megatron_allattn.data.tokenizers import Tokenizer
from megatron_allattn.inference.stops import StopFinder
from megatron_allattn.inference.text_stream import TextStream

Finish = Literal["length", "stop", "end_of_text", "interrupted"]


class Answer:
    """What follows a prompt.

    beginning: the prompt as the model reads it · tokens: all that were added, those of a stop string too, but no token
    that stands for the end of text · text: what can be shown of them so far · finish: why it is over, None while it is
    not · stop: the stop string that has ended it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], num_tokens: int, stops: Sequence[str] = ()) -> None:
        """prompt: the tokens before it · num_tokens: after which it ends."""
        self._stream, self._stops = TextStream(tokenizer), StopFinder(stops)
        self._num_tokens, self._end_of_text = num_tokens, tokenizer.end_of_text_id
        self.beginning = "".join(map(self._stream.add, prompt))
        self.tokens: list[int] = []
        self.text = ""
        self.finish: Finish | None = None

    @property
    def stop(self) -> str | None:
        return self._stops.found

    def add(self, token: int) -> None:
        """The next token."""
        assert self.finish is None
        if token == self._end_of_text:
            self.end("end_of_text")
            return
        self.tokens.append(token)
        self._show(self._stream.add(token))
        if self.finish is None and len(self.tokens) == self._num_tokens:
            self.end("length")

    def end(self, finish: Finish) -> None:
        """Nothing more comes: show what was held back, up to a stop string that it may complete."""
        self._show(self._stream.end())
        if self.finish is None:
            self.text += self._stops.end()
            self.finish = finish

    def _show(self, text: str) -> None:
        self.text += self._stops.add(text)
        if self.stop is not None:
            self.finish = "stop"
