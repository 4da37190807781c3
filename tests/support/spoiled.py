"""A gradient that is not a number, as if a kernel had made it so."""

from typing import Any

from torch import nn


def spoil(weight: nn.Parameter) -> None:
    """From now on its gradient is not a number, before any other hook sees it."""
    hooks: Any = weight._backward_hooks  # called in the order in which they came in
    others = dict(hooks or {})
    if hooks:
        hooks.clear()
    weight.register_hook(lambda gradient: gradient * float("nan"))
    if hooks:
        hooks.update(others)
