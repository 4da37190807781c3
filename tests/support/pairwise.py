"""Few combinations of many switches, among which every two values that may meet do meet."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np

Pair = tuple[tuple[str, Any], ...]


def pairs_of(combination: Mapping[str, Any]) -> list[Pair]:
    """Every two of a combination's values, in its order."""
    return list(combinations(combination.items(), 2))


def legal_combinations(
    values: Mapping[str, Sequence[Any]], legal: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """All there are."""
    return [one for each in product(*values.values()) if legal(one := dict(zip(values, each, strict=True)))]


def pairwise(combinations_: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of these, enough that every two values that are in one of them together are in one of those chosen together.

    The next one chosen is the first of those that bring the most pairs that are missing.
    """
    numbers: dict[Pair, int] = {}
    rows = [[numbers.setdefault(pair, len(numbers)) for pair in pairs_of(one)] for one in combinations_]
    table, missing, chosen = np.array(rows), np.ones(len(numbers), dtype=bool), []
    while missing.any():
        best = int(missing[table].sum(axis=1).argmax())
        missing[table[best]] = False
        chosen.append(combinations_[best])
    return chosen
