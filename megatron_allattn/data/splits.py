"""How --split cuts a corpus: into three contiguous ranges, for training, validation and test."""

import re
from fractions import Fraction

from megatron_allattn.config.errors import usage_error

SPLITS = ("train", "valid", "test")
_WEIGHT = re.compile(r"\s*\d+(\.\d+)?\s*", re.ASCII)


def split_weights(split: str) -> list[Fraction]:
    """The weights of train, valid and test in "90,5,5"; UsageError unless they are three and not all 0."""
    fix = "give three weights for train, valid and test, such as 90,5,5"
    parts = split.split(",")
    if not all(_WEIGHT.fullmatch(part) for part in parts):
        raise usage_error("--split", split, "its parts are not all numbers of 0 or more", fix)
    if len(parts) != len(SPLITS):
        raise usage_error("--split", split, f"has {len(parts)} parts, expected {len(SPLITS)}", fix)
    weights = [Fraction(part.strip()) for part in parts]
    if not any(weights):
        raise usage_error("--split", split, "has no weight above 0", fix)
    return weights


def split_boundaries(split: str, num_tokens: int) -> list[int]:
    """Where the splits of `num_tokens` tokens begin and end: [0, a, b, num_tokens] for train, valid, test.

    `split` is three weights such as "90,5,5". Boundaries are exact fractions rounded down, so one may cut a document in
    two. A split that has a weight and gets no token is refused.
    """
    weights = split_weights(split)
    total = sum(weights)
    boundaries = [0] + [int(num_tokens * sum(weights[:count]) / total) for count in range(1, len(SPLITS) + 1)]
    for index, name in enumerate(SPLITS):
        if weights[index] > 0 and boundaries[index] == boundaries[index + 1]:
            rule = f"leaves none of {num_tokens} tokens to {name}"
            raise usage_error("--split", split, rule, f"give {name} a larger weight, or 0, or more text")
    return boundaries
