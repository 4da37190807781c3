"""Adaptive input and adaptive softmax, vocabulary-parallel (Grave et al. 2017; Baevski & Auli 2018; section 4.3 of the
paper).

The vocabulary, sorted by frequency, is cut into K clusters. Words of cluster k have vectors of width d_k = d / div^k
and a projection P_k [d, d_k] (cluster 0 has one too):

    embedding of word w in cluster k     √d · P_k e_w                                             e_w [d_k]
    head                                 softmax over [E_0 P_0ᵀ h + b_0  |  C h' + c]             C, c: one row a tail
    word w in tail cluster k             p(w) = p_head(cluster k) · softmax(E_k P_kᵀ h + b_k)_w    cluster, h' = P_0ᵀ h

Row K − 1 − k of C belongs to cluster k: the last cluster comes first. Tied, the softmax uses the embedding's E_k and
P_k; b_k, C and c are its own.

The rows of every table (E_k, b_k, C, c) are dealt over the tensor group as those of a plain vocabulary are; projections
are replicated, and since a rank uses them for its own rows only, their gradients are summed over the group. Only the
tokens that hit a cluster go through it, so shapes follow the data: one read by the host for each table of clusters.
Every parameter gets a gradient every time; a cluster that nothing hits works on tensors of no rows.

Collectives, beside those of the residual stream: the embedding one all-reduce backward (all projections); the loss two
forward for all clusters together, one backward (all projections).

Shapes: B streams, M positions, d hidden, n tokens, V_k words of cluster k.
"""

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_allattn.parallel.collectives import copy_to_shards
from megatron_allattn.parallel.cross_entropy import (
    LogitBlock,
    gather_logits,
    sharded_logits,
    vocabulary_parallel_cross_entropy,
    vocabulary_range,
)
from megatron_allattn.parallel.groups import Group
from megatron_allattn.parallel.logical import Init, LogicalTensor, logical_parameter
from megatron_allattn.parallel.products import linear
from megatron_allattn.parallel.vocabulary import locate


@dataclass(frozen=True)
class Clusters:
    """A vocabulary cut at `cutoffs`, the first id of each cluster after the first: ascending, below `vocab_size`."""

    vocab_size: int
    cutoffs: tuple[int, ...]
    hidden_size: int
    div_value: int

    def __post_init__(self) -> None:
        assert all(start < stop for start, stop in itertools.pairwise((0, *self.cutoffs, self.vocab_size))), self
        assert self.cutoffs and min(self.widths) > 0, self

    def __len__(self) -> int:
        return len(self.cutoffs) + 1

    @property
    def starts(self) -> tuple[int, ...]:
        """The first id of every cluster."""
        return (0, *self.cutoffs)

    @property
    def sizes(self) -> tuple[int, ...]:
        """V_k."""
        return tuple(stop - start for start, stop in itertools.pairwise((*self.starts, self.vocab_size)))

    @property
    def widths(self) -> tuple[int, ...]:
        """d_k."""
        return tuple(self.hidden_size // self.div_value**k for k in range(len(self)))

    def own_ids(self, group: Group) -> list[tuple[int, int]]:
        """Of every cluster the ids [start, stop) whose rows this rank owns."""
        ranges = [vocabulary_range(size, group) for size in self.sizes]
        return [(first + start, first + stop) for first, (start, stop) in zip(self.starts, ranges, strict=True)]


class _ClusterTables(nn.Module):
    """E_k and P_k of every cluster, its own or those of another.

    weight: how E_k starts; projections ~ U(±1/√d_k).
    """

    def __init__(
        self, name: str, clusters: Clusters, group: Group, weight: list[Init], tied: "_ClusterTables | None"
    ) -> None:
        super().__init__()
        self.clusters, self.group = clusters, group
        for k, (size, width) in enumerate(zip(clusters.sizes, clusters.widths, strict=True)):
            table = LogicalTensor(f"{name}.cluster{k}.weight", (size, width), 0, weight[k])
            shape, init = (clusters.hidden_size, width), _uniform(width)
            projection = LogicalTensor(f"{name}.cluster{k}.projection", shape, None, init)
            # Registered here, tied ones too, since ZeRO 3 gathers what a module itself has.
            for key, logical in ((f"weight{k}", table), (f"projection{k}", projection)):
                parameter = logical_parameter(logical, group) if tied is None else tied.get_parameter(key)
                self.register_parameter(key, parameter)
        self.register_buffer("cutoffs", torch.tensor(clusters.cutoffs, device="cpu"), persistent=False)

    def weight(self, k: int) -> nn.Parameter:
        """E_k, this rank's rows."""
        return self.get_parameter(f"weight{k}")

    def projections(self) -> list[Tensor]:
        """Every P_k, as input to sharded work: one all-reduce in backward sums their gradients over the group."""
        projections: list[Tensor] = [self.get_parameter(f"projection{k}") for k in range(len(self.clusters))]
        if self.group.size == 1:
            return projections
        together = copy_to_shards(torch.cat(projections, dim=1), self.group)
        return list(together.split(self.clusters.widths, dim=1))

    def cluster_of(self, ids: Tensor) -> Tensor:
        """The cluster of every id."""
        return torch.bucketize(ids, self.get_buffer("cutoffs"), right=True)


class AdaptiveEmbedding(_ClusterTables):
    """Token ids [B, M] → vectors [B, M, d]: of this rank's rows, and zeros for others'; the sum over the group is the
    embedding (`Residual.leave`). E_k ~ N(0, 1), P_k ~ U(±1/√d_k) at the start."""

    def __init__(self, name: str, clusters: Clusters, group: Group) -> None:
        super().__init__(name, clusters, group, [Init("normal", 1.0)] * len(clusters), tied=None)
        self.register_buffer("own_ids", torch.tensor(clusters.own_ids(group), device="cpu"), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        size, count = self.clusters.hidden_size, len(self.clusters)
        ids = tokens.flatten()
        cluster = self.cluster_of(ids)
        start, stop = self.get_buffer("own_ids")[cluster].unbind(dim=-1)
        own = (ids >= start) & (ids < stop)
        places = _sort(cluster.masked_fill(~own, count), count + 1)[:count]  # other ranks' tokens come last
        rows = ids - start
        vectors = [
            linear(F.embedding(rows[place], self.weight(k)), projection)
            for k, (place, projection) in enumerate(zip(places, self.projections(), strict=True))
        ]
        found = torch.cat(vectors)
        embedded = found.new_zeros(len(ids), size).index_copy(0, torch.cat(places), found)
        return (embedded * math.sqrt(size)).view(*tokens.shape, size)


class AdaptiveOutput(_ClusterTables):
    """Hidden states [B, M, d] (`Residual.enter`) → nats per target [B, M], or log-probabilities [B, M, V] without any.

    tied: the embedding whose E_k and P_k it uses. At the start, what is its own of E_k, P_k and b_k ~ U(±1/√d_k), C and
    c ~ U(±1/√d).
    """

    def __init__(self, name: str, clusters: Clusters, group: Group, tied: AdaptiveEmbedding | None = None) -> None:
        super().__init__(name, clusters, group, [_uniform(width) for width in clusters.widths], tied)
        for k, (size, width) in enumerate(zip(clusters.sizes, clusters.widths, strict=True)):
            bias = LogicalTensor(f"{name}.cluster{k}.bias", (size,), 0, _uniform(width))
            self.register_parameter(f"bias{k}", logical_parameter(bias, group))
        tails, init = len(clusters) - 1, _uniform(clusters.hidden_size)
        weight = LogicalTensor(f"{name}.cluster_logits.weight", (tails, clusters.hidden_size), 0, init)
        self.cluster_weight = logical_parameter(weight, group)
        self.cluster_bias = logical_parameter(LogicalTensor(f"{name}.cluster_logits.bias", (tails,), 0, init), group)

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        if targets is None:
            with torch.no_grad():
                return self._log_probabilities(hidden)
        clusters, ids = self.clusters, targets.flatten()
        flat = hidden.flatten(0, 1)
        cluster, projections = self.cluster_of(ids), self.projections()
        head = linear(flat, projections[0].t())
        # Ids and clusters that a block does not hold are nowhere in it, so exactly one of the two has the target.
        softmaxes = [[self._words(0, head, ids), self._tails(head, cluster)]]
        places = _sort(cluster, len(clusters))[1:]
        for k, place in enumerate(places, start=1):
            softmaxes.append([self._words(k, linear(flat[place], projections[k].t()), ids[place])])
        nats, *inside = vocabulary_parallel_cross_entropy(softmaxes, self.group)
        return nats.index_add(0, torch.cat(places), torch.cat(inside)).view_as(targets)

    def _words(self, k: int, projected: Tensor, ids: Tensor) -> LogitBlock:
        """Cluster k's words, from P_kᵀ h [n, d_k], and the target `ids` [n]."""
        place = locate(ids - self.clusters.starts[k], self.clusters.sizes[k], self.group)
        return LogitBlock(projected, self.weight(k), self.get_parameter(f"bias{k}"), self.clusters.sizes[k], *place)

    def _tails(self, projected: Tensor, cluster: Tensor) -> LogitBlock:
        """The tail clusters, the last one first, from P_0ᵀ h [n, d_0], and the targets' clusters [n]."""
        tails = len(self.clusters) - 1
        place = locate(tails - cluster, tails, self.group)
        return LogitBlock(projected, self.cluster_weight, self.cluster_bias, tails, *place)

    def _log_probabilities(self, hidden: Tensor) -> Tensor:
        clusters, projections = self.clusters, self.projections()
        tails = len(clusters) - 1

        def full(projected: Tensor, weight: Tensor, bias: Tensor, size: int) -> Tensor:
            return gather_logits(sharded_logits(projected, weight, bias, size, self.group), size, self.group)

        def words(k: int) -> Tensor:
            return full(
                linear(hidden, projections[k].t()), self.weight(k), self.get_parameter(f"bias{k}"), clusters.sizes[k]
            )

        of_tails = full(linear(hidden, projections[0].t()), self.cluster_weight, self.cluster_bias, tails)
        head = torch.cat([words(0), of_tails], dim=-1).log_softmax(dim=-1)
        parts = [head[..., : clusters.sizes[0]]]
        for k in range(1, len(clusters)):
            parts.append(words(k).log_softmax(dim=-1) + head[..., -k, None])
        return torch.cat(parts, dim=-1)


def _uniform(width: int) -> Init:
    return Init("uniform", 1.0 / math.sqrt(width))


def _sort(keys: Tensor, count: int) -> list[Tensor]:
    """The places, ascending, at which each key 0 … count − 1 stands in `keys` [n]. The host reads the counts."""
    return list(keys.argsort(stable=True).split(torch.bincount(keys, minlength=count).tolist()))
