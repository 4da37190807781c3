"""Heads placed by today's spans: `--balance-heads`."""

from dataclasses import dataclass

from megatron_allattn.engine.interface import Engine
from megatron_allattn.model.placement import balance, head_costs, slowest_share
from megatron_allattn.model.span import layers_look_back


@dataclass(frozen=True)
class Balance:
    """The slowest rank's share of the attention's work before and after; moved: layers whose heads are held by other
    ranks than before."""

    before: float
    after: float
    moved: int
    ranks: int

    def __str__(self) -> str:
        moved = f"{self.moved} layer{'s' * (self.moved != 1)} moved"
        shares = f"{100 * self.before:.1f} % → {100 * self.after:.1f} %"
        return f"{moved}, the slowest rank's share of attention {shares} (even: {100 / self.ranks:.1f} %)"


def balance_heads(engine: Engine) -> Balance:
    """Place the heads of every layer so that the slowest rank has little work at today's spans. Collective."""
    network, ranks = engine.network, engine.groups.tensor.size
    model, spans = network.config, engine.spans()
    assert spans.z is not None, "heads of a fixed span cost the same"
    reach = layers_look_back(spans.z.tolist(), spans.windows, model.max_attention_span, model.span_ramp)
    costs = [head_costs(model, layer) for layer in reach]
    before, after = network.placements, tuple(balance(layer, ranks) for layer in costs)
    engine.place_heads(after)
    moved = sum(old != new for old, new in zip(before, after, strict=True))
    return Balance(slowest_share(costs, before), slowest_share(costs, after), moved, ranks)
