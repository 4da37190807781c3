"""The curve: means of equal parts however long it is, and bars that keep their order."""

import random

import pytest

from megatron_allattn.watching.curve import Curve, drawn


@pytest.mark.parametrize("count", [1, 7, 1023, 1024, 1025, 2048, 5000])
def test_columns_are_means_of_equal_parts(count: int) -> None:
    generator = random.Random(count)
    values = [generator.uniform(0, 5) for _ in range(count)]
    curve = Curve()
    for value in values:
        curve.add(value)
    assert (curve.first, curve.lowest) == (values[0], min(values))
    (mean,) = curve.columns(1)
    assert mean == pytest.approx(sum(values) / count)
    columns = curve.columns(8)
    assert len(columns) == min(8, count)
    if count % 1024 == 0:
        eighth = count // 8
        assert columns == pytest.approx([sum(values[i : i + eighth]) / eighth for i in range(0, count, eighth)])


def test_what_is_no_number_is_a_gap() -> None:
    curve = Curve()
    for value in (None, 3.0, float("nan"), 1.0):
        curve.add(value)
    assert curve.columns(4) == [None, 3.0, None, 1.0]
    assert (curve.first, curve.lowest) == (3.0, 1.0)
    assert drawn(curve.columns(4), 1) == [" █ ▁"]
    assert Curve().columns(10) == []


def test_bars() -> None:
    assert drawn([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 1) == ["▁▂▃▄▅▆▇█"]
    assert drawn([15.0, 8.0, 7.0, 0.0], 2) == ["█▁", "███▁"]
    assert drawn([2.0, 2.0], 2) == ["", "▁▁"]
    assert drawn([], 2) == ["", ""]
    assert all(line.isascii() for line in drawn([1.0, 5.0, 3.0], 3, plain=True))
