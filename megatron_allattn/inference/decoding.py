"""Token after token: what a network writes after a prompt, or side by side after several.

A prompt is read in blocks, and each later token alone, with keys and values kept in between: the time of a token
depends on the heads' spans, not on how much was read or written before. Prompts are read one by one, so that none
depends on the length of another, and their continuations are written together.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_allattn.inference.reader import Reader
from megatron_allattn.inference.sampling import Choose

PROMPT_BLOCK = 512  # tokens of a prompt that are read at once: bounds memory


def read_prompt(reader: Reader, prompt: Sequence[int]) -> Tensor:
    """Read at least one id. Returns the log-probabilities [1, V] of the next. Collective over the tensor group."""
    assert len(prompt) > 0, "a continuation needs something to continue"
    for block in torch.tensor(prompt).split(PROMPT_BLOCK):
        log_probs = reader(block[None], last_only=True)[:, -1]
    return log_probs


def read_prompts(
    new_reader: Callable[[], Reader], prompts: Sequence[Sequence[int]], copies: Sequence[int]
) -> tuple[Reader, Tensor]:
    """Prompts, each `copies` times, side by side: a reader of all these streams and the log-probabilities [S, V] of
    their next tokens.

    new_reader: makes one of one stream that has not started. Collective over the tensor group.
    """
    readers, log_probs = [], []
    for prompt, count in zip(prompts, copies, strict=True):
        reader = new_reader()
        log_probs.append(read_prompt(reader, prompt).expand(count, -1))
        if count > 1:
            reader.repeat(count)
        readers.append(reader)
    together, *others = readers
    if others:
        together.join(others)
    return together, torch.cat(log_probs)


def continuations(reader: Reader, log_probs: Tensor, choose: Choose) -> Iterator[list[int]]:
    """The tokens that follow, without end: at each position the one of every stream, [S] ids.

    log_probs [S, V]: of the next token · choose: the same on every rank. A token is
    read when the next is asked for. Collective over the tensor group.
    """
    while True:
        tokens = choose(log_probs)
        yield tokens.tolist()
        log_probs = reader(tokens[:, None], last_only=True)[:, -1]
