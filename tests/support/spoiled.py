"""What is not a number, as if a kernel had made it so."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from megatron_allattn.engine.interface import Engine


@contextmanager
def spoiled(weight: nn.Parameter) -> Iterator[None]:
    """In here its gradient is not a number, before any other hook sees it."""
    hooks: Any = weight._backward_hooks  # called in the order in which they came in
    others = dict(hooks or {})
    if hooks:
        hooks.clear()
    handle = weight.register_hook(lambda gradient: gradient * float("nan"))
    if hooks is not None:
        hooks.update(others)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def changed_loss(engine: Engine, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """In here this rank's losses are taken to be something else, and its gradients are what they are."""
    true = engine._mean_loss

    def mean_loss(losses: list[Tensor]) -> float:
        return true([change(loss) for loss in losses])

    engine._mean_loss = mean_loss  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine._mean_loss = true  # type: ignore[method-assign]
