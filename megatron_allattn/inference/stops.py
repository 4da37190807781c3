"""Where text that comes in pieces ends: before the first stop string in it.

First is the one that ends first, and of those the longest. So where text ends, and what is shown of it, does not depend
on how it was cut into tokens.
"""

from collections.abc import Sequence


class StopFinder:
    """Add the pieces in order and show what comes back: all but what is, or may still become, a stop string.

    found: the stop string after which nothing more is to be added; it is not shown.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would end everything before it starts"
        self._stops = stops
        self._held = ""
        self.found: str | None = None

    def add(self, piece: str) -> str:
        """What can be shown now."""
        assert self.found is None
        text = self._held + piece
        ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in text]
        if ends:
            end, length, self.found = min(ends)
            self._held = ""
            return text[: end + length]
        held = max((n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        shown = len(text) - held
        self._held = text[shown:]
        return text[:shown]

    def end(self) -> str:
        """What was held back, when no more comes."""
        held, self._held = self._held, ""
        return held
