"""Sizes in which activations.py speaks: of a micro-batch on a rank, of a layer, of what a part of a network holds."""

from dataclasses import dataclass
from typing import Literal

FLOAT = 4  # bytes
Backend = Literal["eager", "blocked", "triton"]


@dataclass(frozen=True)
class Part:
    """Elements that a part of the network holds on a rank.

    kept: from its forward to its backward; forward, backward: the most at any moment of either, with what is kept and,
    in backward, the gradients of its parameters; gradients: of its parameters, which stay; unfinished: those of them
    that an earlier part of the network has yet to add to (tied weights).
    """

    name: str
    kept: int
    forward: int
    backward: int
    gradients: int
    unfinished: int = 0


@dataclass(frozen=True)
class Shape:
    """The sizes of one micro-batch on one of `ranks` tensor-parallel ranks. element: bytes of the precision; cut: the
    residual stream is cut over the ranks (sequence parallelism)."""

    batch: int
    block: int
    ranks: int
    element: int = FLOAT
    cut: bool = False

    @property
    def tokens(self) -> int:
        return self.batch * self.block

    @property
    def own(self) -> int:
        """Tokens of the residual stream on this rank."""
        return self.tokens // self.ranks if self.cut else self.tokens

    def wide(self, count: int) -> int:
        """Elements that take as much as `count` of float32."""
        return count * FLOAT // self.element

    def mask(self, count: int) -> int:
        """Elements that take as much as `count` of one byte."""
        return count // self.element


@dataclass(frozen=True)
class Layer:
    """One layer of a stage. window: W; look_back: how far each local head looks; gradients: elements of its parameters
    on this rank; cached: C, and kept: C of the next block, where ranks share the cache, else 0."""

    index: int
    window: int
    look_back: tuple[int, ...]
    gradients: int
    cached: int = 0
    kept: int = 0


@dataclass(frozen=True)
class Held:
    """What a backend holds of a layer. kept: for its backward pass, its output included; forward: the most in forward;
    backward: the most in backward, with the gradient of its output and those of block and weights that are not the
    layer's own yet, but without that of the residual stream; inputs: those of `kept` that autograd keeps anyway."""

    kept: int
    forward: int
    backward: int
