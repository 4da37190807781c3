"""A text that somebody and the model write in turns, on a terminal or through a pipe.

What is typed and what the model writes is one text, and stays in the keys and values that are kept: nothing is read
twice, and the model sees of it what its heads' spans reach. The first rank listens and prints; the others are told what
to read, and while nobody types that all is well, so that none waits longer than collectives may.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from megatron_allattn.config import UsageError
from megatron_allattn.data.tokenizers import Tokenizer
from megatron_allattn.inference.answer import Answer
from megatron_allattn.inference.decoding import PROMPT_BLOCK, continuations, read_prompt
from megatron_allattn.inference.printing import write
from megatron_allattn.inference.prompts import Prompt, encode
from megatron_allattn.inference.reader import Reader
from megatron_allattn.inference.sampling import Choose
from megatron_allattn.inference.terminal import Interrupts, Keyboard
from megatron_allattn.parallel.collectives import broadcast_object
from megatron_allattn.parallel.groups import Group

HELP = """Type a text and press Enter: the model goes on from it, and all is one text. Enter alone: it goes on.
/reset forgets the text, /help says this, and a text that starts with / is typed with //.
Ctrl-C stops an answer; Ctrl-C at the prompt, or Ctrl-D, ends.
"""


class Conversation:
    """The text so far. Collective over the tensor group.

    new_reader: of one stream that has not started · choose: what chooses the tokens of an answer, by its number ·
    num_tokens: of an answer, at most · stops: each ends an answer and is part of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        new_reader: Callable[[], Reader],
        choose: Callable[[int], Choose],
        *,
        num_tokens: int,
        stops: Sequence[str] = (),
    ) -> None:
        self.tokenizer, self._new_reader, self._choose = tokenizer, new_reader, choose
        self._num_tokens, self._stops = num_tokens, stops
        self.reset()

    def reset(self) -> None:
        """Forget everything, as if it had just begun."""
        self._reader, self._turn = self._new_reader(), 0
        self._unread: list[int] = []  # what is part of the text and was not read yet, such as an answer's last token

    def answer(self, tokens: Sequence[int], interrupted: Callable[[], bool]) -> Iterator[Answer]:
        """Go on from the text and these tokens: the answer, each time that it has grown, and once it is over.

        interrupted: asked before every block that is read and after every token, the same on every rank. What was not
        read then is read in the next turn.
        """
        self._unread += tokens
        if not self._unread:
            return
        answer = Answer(self.tokenizer, self._unread, self._num_tokens, self._stops)
        choose, self._turn = self._choose(self._turn), self._turn + 1
        while self._unread and not (stopped := interrupted()):
            log_probs = read_prompt(self._reader, self._unread[:PROMPT_BLOCK])
            self._unread = self._unread[PROMPT_BLOCK:]
        if not stopped:
            for token in continuations(self._reader, log_probs, choose):
                self._unread = token
                answer.add(token[0])
                yield answer
                if answer.finish is not None or interrupted():
                    break
        if answer.finish is None:
            answer.end("interrupted")
        yield answer


@dataclass(frozen=True)
class Order:
    """What the first rank tells the others. tokens: read these and answer · reset · end; none of them: wait on."""

    tokens: list[int] | None = None
    reset: bool = False
    end: bool = False


def converse(conversation: Conversation, group: Group, timeout: float) -> None:
    """Until the end of standard input, or Ctrl-C at the prompt. Collective; timeout: of collectives, in seconds."""
    first = group.rank == 0
    with Interrupts(heeded=first) as interrupts:
        beat = timeout / 4 if group.size > 1 else float("inf")
        orders = Listener(conversation.tokenizer, interrupts, beat).orders() if first else None
        while not (order := broadcast_object(next(orders) if orders else None, group)).end:
            if order.reset:
                conversation.reset()
            if order.tokens is not None:
                shown = 0
                for answer in conversation.answer(
                    order.tokens, lambda: broadcast_object(interrupts.count > 0 if first else None, group)
                ):
                    if first:
                        write(answer.text[shown:])
                        shown = len(answer.text)
                if first:
                    write("\n")


@dataclass
class Listener:
    """Makes orders of what is typed. beat: seconds after which the others hear that nothing was.

    Text that cannot be read is told, and no reason to end.
    """

    tokenizer: Tokenizer
    interrupts: Interrupts
    beat: float
    _begun: bool = field(default=False, init=False)

    def orders(self) -> Iterator[Order]:
        """The last one says that it is the end."""
        with Keyboard() as keyboard:
            if keyboard.terminal:
                write(HELP)
            while self.interrupts.count < 2:  # it stopped the answer, and again
                self.interrupts.count = 0
                keyboard.ask("> ")
                heard = time.monotonic()
                while not keyboard.answered(seconds=0.1) and not self.interrupts.count:
                    if time.monotonic() > heard + self.beat:
                        heard = time.monotonic()
                        yield Order()
                if self.interrupts.count or keyboard.line is None:
                    break
                yield self._order(keyboard.line)
            if keyboard.terminal:
                write("\n")
        yield Order(end=True)

    def _order(self, line: str) -> Order:
        if line == "/reset":
            self._begun = False
            return Order(reset=True)
        if line == "/help":
            write(HELP)
            return Order()
        if line.startswith("/") and not line.startswith("//"):
            return self._told(f"{line.split()[0]} is no command; there are /reset and /help, and // for a text with /")
        try:
            tokens, note = encode(Prompt(os.fsencode(line.removeprefix("/")), "this line"), self.tokenizer)
        except UsageError as error:
            return self._told(str(error))
        if note:
            self._told(note)
        if not tokens and not self._begun:
            return self._told("there is nothing yet to go on from")
        self._begun = True
        return Order(tokens=tokens)

    def _told(self, what: str) -> Order:
        print(f"note: {what}", file=sys.stderr, flush=True)
        return Order()
