"""What the compiler makes of the Triton kernels, ahead of time: registers, spills, shared memory. No GPU is needed."""

import pytest
import torch

pytest.importorskip("triton")

from tests.support.layouts import rest
from tests.support.triton_compile import compiled, launches

KERNELS = [
    *("position_products", "forward_rows", "position_products", "backward_rows", "edge_gradient"),
    *("position_gradient", "add_positions", "context_gradient", "persistent_gradient"),
]
SHARED_MEMORY = 99 * 1024  # of a program on every GPU from compute capability 8.0 on


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing from an earlier run, and nothing left behind."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


@pytest.mark.parametrize("capability", [80, *rest(90)])
def test_no_kernel_spills_registers_at_heads_of_64_in_bfloat16(
    monkeypatch: pytest.MonkeyPatch, capability: int
) -> None:
    launched = launches(monkeypatch, 64, torch.bfloat16)
    assert [launch.kernel.__name__ for launch in launched] == KERNELS
    found = {launch.kernel.__name__: compiled(launch, capability) for launch in launched}
    for name, resources in found.items():
        assert (resources.stack, resources.local) == (0, 0), name
        assert 32 < resources.registers <= 255, name
        assert resources.shared <= SHARED_MEMORY, name


def test_positions_on_values_take_two_kernels_more(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [launch.kernel.__name__ for launch in launches(monkeypatch, 64, torch.bfloat16, "shared")]
    assert sorted(names) == sorted([*KERNELS, "add_positions", "position_products", "position_gradient"])


def test_nothing_of_a_row_and_a_distance_is_kept_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """What forward and backward share: the packed memory of each is its own and as large as the heads' spans."""
    launched = {launch.kernel.__name__: launch.arguments for launch in launches(monkeypatch, 64, torch.bfloat16)}
    first, second = (launched[name]["logits"] for name in ("forward_rows", "backward_rows"))
    padded = sum(-(-span // 16) * 16 for span in (33, 40, 64, 100, 160, 300, 700, 1519))
    assert first is not second
    assert first.numel() == second.numel() == 2 * 512 * padded
