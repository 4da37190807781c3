"""Stop strings end a text at the same place, and show the same of it, however it is cut."""

import itertools
import random

import pytest

from megatron_allattn.inference.stops import StopFinder


def found(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """All that is shown, and the stop string."""
    finder, shown = StopFinder(stops), ""
    for piece in pieces:
        shown += finder.add(piece)
        if finder.found is not None:
            return shown, finder.found
    return shown + finder.end(), None


def by_definition(stops: list[str], text: str) -> tuple[str, str | None]:
    """Looking at every beginning of the text, the shortest first, for the longest stop string at its end."""
    for end in range(len(text) + 1):
        there = [stop for stop in stops if text[:end].endswith(stop)]
        if there:
            stop = max(there, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["END"], "one END two END", ("one ", "END")),
        (["END"], "one EN", ("one EN", None)),
        (["abc", "b"], "xabc", ("xa", "b")),
        (["bc", "abc"], "xabc", ("x", "abc")),
        (["aab"], "aaab", ("a", "aab")),
        (["€", "é\n"], "a é €é", ("a é ", "€")),
        (["\U0001f600"], "\U0001f601\U0001f600", ("\U0001f601", "\U0001f600")),
        ([], "anything", ("anything", None)),
        (["x"], "", ("", None)),
    ],
)
def test_where_a_text_ends(stops: list[str], text: str, expected: tuple[str, str | None]) -> None:
    assert by_definition(stops, text) == expected
    for mask in itertools.product([False, True], repeat=max(0, min(len(text), 9) - 1)):
        cuts = [0, *(place for place, cut in enumerate(mask, start=1) if cut), len(text)]
        assert found(stops, [text[a:b] for a, b in itertools.pairwise(cuts)]) == expected


def test_any_texts_in_any_pieces() -> None:
    generator = random.Random(3)
    for _ in range(300):
        stops = ["".join(generator.choices("ab", k=generator.randint(1, 4))) for _ in range(generator.randint(1, 3))]
        text = "".join(generator.choices("abc", k=generator.randint(0, 12)))
        cuts = sorted(generator.choices(range(len(text) + 1), k=4))
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        assert found(stops, pieces) == by_definition(stops, text), (stops, pieces)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    finder = StopFinder(["\n\n", "END"])
    pieces = ["ab", "E", "N", "E", "X", "\n", "x", "N"]
    assert [finder.add(piece) for piece in pieces] == ["ab", "", "", "EN", "EX", "", "\nx", "N"]
    assert (finder.end(), finder.found) == ("", None)
    assert (finder.add("\n"), finder.end()) == ("", "\n")


def test_an_empty_stop_string_is_none() -> None:
    with pytest.raises(AssertionError, match="would end everything"):
        StopFinder(["a", ""])
