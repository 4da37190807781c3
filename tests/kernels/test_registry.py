"""Backends by name."""

import pytest

from megatron_allattn.kernels import eager
from megatron_allattn.kernels.registry import backend


def test_eager_is_the_eager_backend() -> None:
    assert backend("eager") is eager.attend


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="attention backend 'fast': known are eager"):
        backend("fast")
