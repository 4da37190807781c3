"""Token after token: what a network writes after a prompt.

The prompt is read in blocks, and each later token alone, with keys and values kept in between: the time of a token
depends on the heads' spans, not on how much was read or written before.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_allattn.inference.reader import Reader

PROMPT_BLOCK = 512  # tokens of a prompt that are read at once: bounds memory


def continuations(
    reader: Reader, prompt: Sequence[int], choose: Callable[[Tensor], Tensor], num_samples: int = 1
) -> Iterator[list[int]]:
    """The tokens after the prompt, without end: at each position the one of every sample, [num_samples] ids.

    reader: of one stream that has not started · prompt: at least one id · choose: log-probabilities [S, V] of the next
    token → ids [S], the same on every rank. Collective over the tensor group.
    """
    assert len(prompt) > 0, "a continuation needs something to continue"
    for block in torch.tensor(prompt).split(PROMPT_BLOCK):
        log_probs = reader(block[None], last_only=True)[:, -1]
    if num_samples > 1:
        reader.repeat(num_samples)
        log_probs = log_probs.expand(num_samples, -1)
    while True:
        tokens = choose(log_probs)
        yield tokens.tolist()
        log_probs = reader(tokens[:, None], last_only=True)[:, -1]
