"""Where a run's training stands beside its step, its tensors and its place in the data.

It is part of state.json, and the part that a conversion with an optimizer's state keeps: Adam's bias correction needs
the number of updates, a plateau's rate the step at which it dropped, and float16 its loss scale.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megatron_allattn.config import RunConfig, UsageError
from megatron_allattn.engine.loss_scale import LossScaleState


@dataclass(frozen=True, kw_only=True)
class Progress:
    """tokens: trained on; judged: the last step after which validation was looked at, if it was due; skipped: updates
    left out; skipped_in_a_row: since the last one that was not; recent_losses: what the next loss is compared
    with; plateau, loss_scale: their states, if there are any.
    """

    tokens: int = 0
    judged: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    recent_losses: tuple[float, ...] = ()
    plateau: dict[str, Any] | None = None
    loss_scale: dict[str, Any] | None = None

    @classmethod
    def at(cls, step: int, run: RunConfig) -> Self:
        """Of a run that has left out nothing and that nothing more is known of."""
        return cls(tokens=step * run.training.global_batch_size * run.training.seq_length, judged=step)

    @classmethod
    def of(cls, path: Path, content: dict[str, Any], step: int, run: RunConfig) -> Self:
        """What `to_dict` gave, among others, as it stands in a file; what is not there is as in `at`.

        Raises UsageError: it is nothing that a run at this step has.
        """
        usual = cls.at(step, run)
        found = {name: content.get(name, getattr(usual, name)) for name in vars(usual)}
        losses, plateau, scale = found["recent_losses"], found["plateau"], found["loss_scale"]
        right = {
            "tokens": _is_count(found["tokens"]),
            "judged": _is_count(found["judged"], step),
            "skipped": _is_count(found["skipped"], step),
            "skipped_in_a_row": _is_count(found["skipped_in_a_row"], step),
            "recent_losses": isinstance(losses, list | tuple) and all(map(_is_number, losses)),
            "plateau": plateau is None or _is_plateau(plateau, step),
            "loss_scale": scale is None or _is_loss_scale(scale),
        }
        for name in (name for name, is_right in right.items() if not is_right):
            rule = f"{name} is {_short(found[name])}, which no run at step {step} has"
            raise UsageError(f"{path}: {rule}; give one that was made here")
        return cls(**found | {"recent_losses": tuple(losses)})

    def to_dict(self) -> dict[str, Any]:
        """As JSON-able values, by the names that state.json has for them."""
        return vars(self) | {"recent_losses": list(self.recent_losses)}


def _is_count(value: Any, largest: float = math.inf) -> bool:
    return type(value) is int and 0 <= value <= largest


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_plateau(value: Any, step: int) -> bool:
    """What `training.plateau.Plateau` is made of; {} is its beginning."""
    if not isinstance(value, dict) or not value.keys() <= {"best", "count", "dropped_at"}:
        return False
    best, dropped_at = value.get("best"), value.get("dropped_at")
    right = (best is None or _is_number(best)) and (dropped_at is None or _is_count(dropped_at, step))
    return right and _is_count(value.get("count", 0))


def _is_loss_scale(value: Any) -> bool:
    names = LossScaleState.__dataclass_fields__.keys()
    return isinstance(value, dict) and value.keys() == names and all(map(_is_number, value.values()))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
