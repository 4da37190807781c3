"""What the heads of the `blocked` backend have computed, counted where they do it: how well heads are balanced."""

import ctypes


class ScoreCounts:
    """Elements of scores by layer and local head: of every unit of rows, rows · (S + N), which forward and backward
    compute once each. Tiles that a block does not fill and distances beyond a head's span are computed too."""

    def __init__(self) -> None:
        self._of: dict[int, ctypes.Array[ctypes.c_int64]] = {}

    def of(self, layer: int, heads: int) -> "ctypes.Array[ctypes.c_int64]":
        """The counts of a layer, to be added to: int64 [H], at one address until `clear`."""
        if layer not in self._of or len(self._of[layer]) != heads:
            self._of[layer] = (ctypes.c_int64 * heads)()
        return self._of[layer]

    def by_layer(self) -> dict[int, list[int]]:
        """What has been counted since the last `clear`, [H] of every layer that was computed."""
        return {layer: list(counts) for layer, counts in sorted(self._of.items())}

    def clear(self) -> None:
        """Begin anew."""
        self._of = {}
