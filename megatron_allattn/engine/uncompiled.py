"""torch's compiler stays unloaded: a run compiles nothing with it.

torch's optimizers load it at their first call, only to tell it to keep out, and DeepSpeed decorates functions of its
Muon with it. That is half of the time in which a rank starts, 120 MB of memory, and on a cluster a thousand files
for every rank. (ZeRO 3 and full recomputation load it at the first step, for what they tell it there.)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

_KEPT_OUT = "__dynamo_disable"  # where torch/_compile.py looks for a function's version for the compiler


@contextmanager
def without_compiler() -> Iterator[None]:
    """Functions that are given to torch's compiler in here stay what they are, and those of optimizers for good.

    Where torch has other names for them the compiler is loaded, as ever.
    """
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        plain = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if plain is not None and not hasattr(plain, _KEPT_OUT):
            setattr(plain, _KEPT_OUT, plain)
    with patch.object(torch, "compile", _as_it_is):
        yield


def _as_it_is(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    """The function itself, also as a decorator with arguments."""
    return function if function is not None else _as_it_is
