"""Scratch memory: reused, grown, and never mixed up."""

import torch

from megatron_allattn.kernels.workspace import Workspace

CPU = torch.device("cpu")


def test_a_buffer_is_reused_by_name_for_any_shape_that_fits() -> None:
    workspace = Workspace()
    first = workspace.take("a", (4, 6), torch.float32, CPU)
    assert first.shape == (4, 6) and first.is_contiguous() and first.dtype == torch.float32
    for shape in ((4, 6), (3, 5), (24,), (0, 7), (2, 3, 4)):
        again = workspace.take("a", shape, torch.float32, CPU)
        assert tuple(again.shape) == shape and again.is_contiguous()
        assert again.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()


def test_a_buffer_grows_and_stays_grown() -> None:
    workspace = Workspace()
    workspace.take("a", (10,), torch.float32, CPU)
    large = workspace.take("a", (30, 10), torch.float32, CPU)
    assert workspace.take("a", (10,), torch.float32, CPU).data_ptr() == large.data_ptr()
    assert large.untyped_storage().nbytes() == 1200


def test_names_and_types_have_memory_of_their_own() -> None:
    workspace = Workspace()
    taken = [workspace.take(*request, CPU) for request in (
        ("a", (8,), torch.float32), ("b", (8,), torch.float32), ("a", (8,), torch.float64), ("a", (8,), torch.int32)
    )]  # fmt: skip
    assert len({tensor.data_ptr() for tensor in taken}) == 4
    for value, tensor in enumerate(taken):
        tensor.fill_(value)
    assert [tensor.unique().tolist() for tensor in taken] == [[0], [1], [2], [3]]


def test_zeros_are_zeros_whatever_was_there() -> None:
    workspace = Workspace()
    workspace.take("a", (50,), torch.float32, CPU).fill_(torch.nan)
    assert torch.equal(workspace.zeros("a", (5, 4), torch.float32, CPU), torch.zeros(5, 4))


def test_two_workspaces_share_nothing() -> None:
    first, second = Workspace(), Workspace()
    assert first.take("a", (8,), torch.float32, CPU).data_ptr() != second.take("a", (8,), torch.float32, CPU).data_ptr()
