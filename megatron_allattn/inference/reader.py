"""Streams of tokens through a network with fixed weights, block after block, with what it keeps of earlier blocks.

That is K and V of every head as far back as the head looks (kernels/cached.py). Another attention backend can be asked
for, to hold one against the other; it sees earlier blocks through hidden states, as in training.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_allattn.config import ModelConfig, UsageError
from megatron_allattn.engine.caches import CacheSlot
from megatron_allattn.engine.interface import Spans
from megatron_allattn.kernels.cached import CachedAttention
from megatron_allattn.kernels.registry import Attend, make_blocked
from megatron_allattn.model.attention import BlockContext
from megatron_allattn.model.backends import backend_of
from megatron_allattn.model.network import Network


class Reader:
    """B streams that start empty. Collective over the tensor group.

    network: at its weights, in any precision · spans: its spans (`find_spans`) · attend: a backend instead of kept
    keys and values.
    """

    def __init__(self, network: Network, spans: Spans, batch_size: int, attend: Attend | None = None) -> None:
        model, weight = network.config, next(network.parameters())
        self._network, self._device = network, weight.device
        self._kept: CachedAttention | None = None
        if attend is None:
            self._kept = CachedAttention(make_blocked(self._device))
        self._slot: _NoStates | CacheSlot = (
            _NoStates(weight.new_zeros(batch_size, 0, model.hidden_size))
            if attend is None
            else CacheSlot(range(model.num_layers), batch_size, model.hidden_size, weight.dtype, weight.device)
        )
        self._context = BlockContext(
            spans.windows, self._slot, dropout_keys=None, look_back=spans.look_back, attend=attend or self._kept
        )

    @torch.no_grad()
    def __call__(self, tokens: Tensor, targets: Tensor | None = None, *, last_only: bool = False) -> Tensor:
        """Read the next tokens [B, M] of every stream. Returns what `Network.forward` does: nats of the targets [B, M],
        or log-probabilities [B, M, V], with `last_only` of what follows the last token [B, 1, V]."""
        ids, wanted = (None if one is None else one.to(self._device) for one in (tokens, targets))
        found = self._network(ids, self._context, wanted, last_only=last_only)
        self._slot.commit(tokens.shape[1])
        return found

    def repeat(self, count: int) -> None:
        """Go on with `count` copies of every stream, side by side."""
        for part in self._parts():
            part.repeat(count)

    def join(self, others: Sequence["Reader"]) -> None:
        """Go on with the streams of other readers of the same network behind its own, one token of each at a time.

        Each has read something; how much may differ. The others are not used any more.
        """
        kept, slot = self._parts()
        parts = [reader._parts() for reader in others]
        kept.join([other for other, _ in parts])
        slot.join([other for _, other in parts])

    def _parts(self) -> "tuple[CachedAttention, _NoStates]":
        """What there is of each stream."""
        assert self._kept is not None and isinstance(self._slot, _NoStates), "only keys and values are copied or joined"
        return self._kept, self._slot


def named_attend(name: str, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> Attend | None:
    """What a `Reader` is given for --attention-backend: None for `cached`, else a backend of training.

    Raises UsageError where it is unknown or cannot run here.
    """
    if name == "cached":
        return None
    try:
        return backend_of(model, name, device, dtype).attend
    except UsageError as error:  # its way out is for training, which has auto and no cached
        raise UsageError(f"{str(error).partition('; ')[0]}; choose cached or eager") from None


class _NoStates:
    """In place of hidden-state caches: it counts the tokens that have passed and keeps none."""

    def __init__(self, empty: Tensor) -> None:
        self._empty, self.length = empty, 0

    def read(self, layer: int) -> Tensor:
        return self._empty

    def written(self, layer: int) -> bool:
        return False

    def write(self, layer: int, hidden: Tensor) -> None:
        pass

    def commit(self, block_length: int) -> None:
        self.length += block_length

    def repeat(self, count: int) -> None:
        self._empty = self._empty.repeat_interleave(count, dim=0)

    def join(self, others: Sequence["_NoStates"]) -> None:
        slots = (self, *others)
        self._empty, self.length = torch.cat([slot._empty for slot in slots]), min(slot.length for slot in slots)
