"""Which module calls: in forward the one that runs, in backward the one that made the node that autograd is at.

Autograd numbers its nodes as they are made. Whenever a module begins or ends, the number that the next node gets is
written down beside the name of the module that goes on; so a node's number leads to its module.
"""

from bisect import bisect_right
from functools import partial
from typing import Any

import torch

from megatron_allattn.model.network import Network

WHOLE = ""  # outside of the network's modules


class Places:
    """Follows the modules of a stage's `network` while it runs forward and backward; layers have the numbers that they
    have in the whole network."""

    def __init__(self, network: Network) -> None:
        self._running: list[str] = []
        self._numbers: list[int] = []
        self._names: list[str] = []
        for name, module in network.named_modules():
            if name:
                kind, _, rest = name.partition(".")
                layer, _, part = rest.partition(".")
                if kind == "layers" and layer:
                    name = ".".join([kind, str(network.part.layers[int(layer)]), *([part] if part else [])])
                module.register_forward_pre_hook(partial(self._begin, name))
                module.register_forward_hook(self._end)  # not where it fails: there it stays

    def now(self) -> str:
        """The name of the module at work."""
        node = torch._C._current_autograd_node()
        if self._running or node is None:
            return self._running[-1] if self._running else WHOLE
        found = bisect_right(self._numbers, node._sequence_nr())
        return self._names[found - 1] if found else WHOLE

    def _begin(self, name: str, *_: Any) -> None:
        self._running.append(name)
        self._note()

    def _end(self, *_: Any) -> None:
        self._running.pop()
        self._note()

    def _note(self) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._names.append(self._running[-1] if self._running else WHOLE)
