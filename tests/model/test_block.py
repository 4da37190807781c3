"""What a layer has autograd keep in place of what can be made again."""

import gc
import weakref

import pytest
import torch

from megatron_allattn.model.block import _MadeAgain


def test_made_again_where_backward_wants_it() -> None:
    weight, made = torch.randn(3, 4, requires_grad=True), []
    source = torch.randn(2, 4)

    def make() -> torch.Tensor:
        made.append(1)
        return source.clone()

    entered = make()
    with _MadeAgain([(entered, make)]):
        product = entered @ weight.T
    del entered
    product.sum().backward()
    assert len(made) == 2
    assert weight.grad is not None and torch.equal(weight.grad, source.sum(0).expand(3, 4))


@pytest.mark.parametrize("name", ["softmax", "exp", "sigmoid"])
def test_a_result_that_its_operation_keeps_goes_with_the_last_who_knows_it(name: str) -> None:
    """Else everything that a step has kept would stay until Python looks for cycles, which it does as it likes."""
    leaf = torch.randn(2, 4, requires_grad=True)
    gc.disable()
    try:
        with _MadeAgain([(torch.ones(5), lambda: torch.ones(5))]):
            result = leaf.softmax(0) if name == "softmax" else getattr(leaf, name)()
        known = weakref.ref(result)
        del result
        assert known() is None
    finally:
        gc.enable()
