"""A language model of any variant of the paper's ablation, in loops over tokens and heads: an independent truth.

Written from the paper's equations on float64 vectors, with names and shapes of the logical weights and nothing else of
the package, so that autograd gives true gradients. Dropout masks come from Python integers.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_allattn.config import ModelConfig
from tests.support.slow_attention import (
    ATTENTION_SITE,
    EMBEDDING_SITE,
    FEED_FORWARD_SITE,
    REPRESENTATION_SITE,
    keep_factor,
    normalized,
)


@dataclass
class Term:
    """One key/value pair that a query can attend to; `column` is its name in the dropout mask."""

    column: int
    score: Tensor
    value: Tensor
    mask: Tensor | float = 1.0


@dataclass
class SlowModel:
    """weights: full logical tensors by name; streams: global ids of the batch's rows, or None for no dropout."""

    config: ModelConfig
    weights: dict[str, Tensor]
    seed: int = 0
    streams: list[int] | None = None
    step: int = 0

    def losses(self, inputs: Tensor, targets: Tensor, past: list[list[list[Tensor]]]) -> Tensor:
        """Nats per target [B, M] of the next block. past[layer][stream]: hidden states before it; they are added to."""
        return torch.stack(
            [
                torch.stack(self._stream(b, inputs[b].tolist(), targets[b].tolist(), [layer[b] for layer in past]))
                for b in range(len(inputs))
            ]
        )

    def _stream(self, b: int, inputs: list[int], targets: list[int], past: list[list[Tensor]]) -> list[Tensor]:
        model, w = self.config, self.weights
        p = model.embedding_dropout
        block = [self._drop(w["embedding.weight"][token], p, EMBEDDING_SITE, b, t) for t, token in enumerate(inputs)]
        for layer in range(model.num_layers):
            part = {
                name.removeprefix(f"layers.{layer}."): tensor
                for name, tensor in w.items()
                if name.startswith(f"layers.{layer}.")
            }
            after = []
            for t, x in enumerate(block):
                before = past[layer] + block[:t]
                y = torch.cat(self._heads(part, layer, b, t, x, before))
                if model.variant == "single-head":
                    y = y + self._single_head(part, layer, b, t, part["query.weight"] @ x)
                z = _norm(x + part["out.weight"] @ y, part, "norm1")
                if model.variant in ("transformer", "ff-attn"):
                    z = _norm(z + self._feed_forward(part, layer, b, t, z), part, "norm2")
                after.append(z)
            past[layer] += [x.detach() for x in block]
            block = after
        found = []
        for t, (x, target) in enumerate(zip(block, targets, strict=True)):
            x = self._drop(x, p, REPRESENTATION_SITE, b, t)
            logits = w["output.weight"] @ x + w["output.bias"]
            found.append(logits.exp().sum().log() - logits[target])
        return found

    def _heads(
        self, part: dict[str, Tensor], layer: int, b: int, t: int, x: Tensor, before: list[Tensor]
    ) -> list[Tensor]:
        """What each head puts out for one token."""
        model = self.config
        outputs = []
        for head in range(model.num_attention_heads):
            size = model.hidden_size // model.num_attention_heads
            q = part["query.weight"][head * size : (head + 1) * size] @ x
            own = head // 2 if model.variant == "head-split" else head  # its place among heads of its kind
            row = (ATTENTION_SITE, self.step, layer, self._id(b), head, t)
            if model.variant == "head-split" and head % 2:
                outputs.append(self._attend(self._persistent_terms(part, own, q), row, soft=False))
                continue
            context = self._context_terms(part, own, q, before)
            if model.variant == "all-attn" and model.persistent_memory_size:
                outputs.append(
                    self._attend(context + self._persistent_terms(part, own, q), row, soft=model.adaptive_span)
                )
            elif model.variant == "attn-split":
                persistent = self._attend(self._persistent_terms(part, own, q), row, soft=False)
                outputs.append(self._attend(context, row, soft=model.adaptive_span) + persistent)
            else:
                outputs.append(self._attend(context, row, soft=model.adaptive_span))
        return outputs

    def _context_terms(self, part: dict[str, Tensor], head: int, q: Tensor, before: list[Tensor]) -> list[Term]:
        """Equations 3 and 4: the L positions before a token."""
        model, size, span = self.config, len(q), self.config.max_attention_span
        rows = slice(head * size, (head + 1) * size)
        terms = []
        for distance in range(1, span + 1):
            if distance > len(before):
                if model.empty_cache == "mask":
                    continue
                x = torch.zeros(model.hidden_size, dtype=q.dtype)
            else:
                x = before[-distance]
            u = self.weights["position.key"][0, :, span - distance]
            value = part["value.weight"][rows] @ x
            mask: Tensor | float = 1.0
            if model.adaptive_span:
                z = part["span"][head, 0, 0]
                mask = ((model.span_ramp + z * span + 1 - distance) / model.span_ramp).clamp(0, 1)
            terms.append(
                Term(
                    column=-distance,
                    score=q @ (part["key.weight"][rows] @ x + u) / math.sqrt(size),
                    value=value + u if model.position_values == "shared" else value,
                    mask=mask,
                )
            )
        return terms

    def _persistent_terms(self, part: dict[str, Tensor], head: int, q: Tensor) -> list[Term]:
        """Section 5.1: k_i = √d_h k'_i and v_i = √N v'_i."""
        keys, values = part["persistent.key"][head], part["persistent.value"][head]
        return [
            Term(
                column=i,
                score=q @ (math.sqrt(len(q)) * keys[:, i]) / math.sqrt(len(q)),
                value=math.sqrt(len(values)) * values[i],
            )
            for i in range(len(values))
        ]

    def _single_head(self, part: dict[str, Tensor], layer: int, b: int, t: int, q: Tensor) -> Tensor:
        """One set of vectors of width d for the queries of all heads."""
        return self._attend(
            self._persistent_terms(part, 0, q), (ATTENTION_SITE, self.step, layer, self._id(b), 0, t), soft=False
        )

    def _attend(self, terms: list[Term], row: tuple[int, ...], soft: bool) -> Tensor:
        """The weighted average; `soft`: with span masks, normalized as the model says."""
        masks = [torch.as_tensor(term.mask, dtype=torch.float64) for term in terms]
        normalization = self.config.span_normalization if soft else "span"
        weights = normalized([term.score for term in terms], masks, normalization)
        p = self.config.attention_dropout
        size = self.config.hidden_size // self.config.num_attention_heads
        return sum(
            (
                self._keep(row, term.column, p) * weight * term.value
                for term, weight in zip(terms, weights, strict=True)
            ),
            torch.zeros(len(terms[0].value) if terms else size, dtype=torch.float64),
        )

    def _feed_forward(self, part: dict[str, Tensor], layer: int, b: int, t: int, x: Tensor) -> Tensor:
        """Equation 5, or equation 9 with V = k' and U = √N v'."""
        row, p = (FEED_FORWARD_SITE, self.step, layer, self._id(b), t), self.config.feed_forward_dropout
        if self.config.variant == "transformer":
            units = (part["ff.in.weight"] @ x + part["ff.in.bias"]).clamp(min=0)
            kept = torch.stack([unit * self._keep(row, i, p) for i, unit in enumerate(units)])
            return part["ff.out.weight"] @ kept + part["ff.out.bias"]
        keys, values = part["ff.persistent.key"][0], part["ff.persistent.value"][0]
        exponentials = [(keys[:, i] @ x).exp() for i in range(len(values))]
        total, scale = sum(exponentials), math.sqrt(len(values))
        return sum(
            self._keep(row, i, p) * exponential / total * scale * values[i]
            for i, exponential in enumerate(exponentials)
        )

    def _id(self, b: int) -> int:
        return self.streams[b] if self.streams is not None else 0

    def _keep(self, row: tuple[int, ...], column: int, p: float) -> float:
        if self.streams is None or p == 0.0:
            return 1.0
        return keep_factor(self.seed, row, column, p)

    def _drop(self, x: Tensor, p: float, site: int, b: int, t: int) -> Tensor:
        row = (site, self.step, self._id(b), t)
        return x * torch.tensor([self._keep(row, channel, p) for channel in range(len(x))], dtype=x.dtype)


def _norm(x: Tensor, part: dict[str, Tensor], name: str) -> Tensor:
    centred = x - x.mean()
    return centred / (centred.square().mean() + 1e-5).sqrt() * part[f"{name}.weight"] + part[f"{name}.bias"]
