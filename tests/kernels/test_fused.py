"""`--fused`: which apex is installed, if any, and what is said about it. Packages are made up in a folder."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron_allattn.kernels.fused import FusedOps, apex_kind, choose_fused
from megatron_allattn.kernels.multi_tensor import AdamStep

FAILING = "raise RuntimeError('imported')"  # PyPI's apex cannot be imported without other packages
NORM = """
def fused_layer_norm_affine(x, weight, bias, shape, eps):
    return "from apex"
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install(path=text, …)` makes modules in a folder that is searched first."""

    def write(**files: str) -> None:
        for name, text in files.items():
            path = tmp_path / (name.replace("__in__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    for name in [name for name in sys.modules if name.split(".")[0] in ("apex", "amp_C")]:
        del sys.modules[name]


def nvidia(install: Install, norm: str = NORM) -> None:
    """A package that looks like NVIDIA's apex."""
    install(
        apex__in____init__="",
        apex__in__normalization__in____init__="",
        apex__in__normalization__in__fused_layer_norm=norm,
    )


def test_without_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not (Path(folder) / "apex").exists()])
    assert apex_kind() == "absent"
    for cuda in (True, False):
        assert choose_fused("auto", cuda) == FusedOps("torch (NVIDIA's apex is not installed)")
        with pytest.raises(
            ValueError, match=r"^--fused apex: NVIDIA's apex is not installed; build apex from NVIDIA's"
        ):
            choose_fused("apex", cuda)


def test_the_web_toolkit_of_that_name_is_recognized_without_an_import(install: Install) -> None:
    install(apex__in____init__=FAILING, apex__in__lib__in____init__=FAILING)
    assert apex_kind() == "foreign"
    note = choose_fused("auto", True).note
    assert note == "torch (the installed package 'apex' is not NVIDIA's (PyPI's apex is an unrelated web toolkit))"
    with pytest.raises(ValueError, match="PyPI's apex is an unrelated web toolkit") as refusal:
        choose_fused("apex", True)
    assert "\n" not in str(refusal.value)
    assert "apex" not in sys.modules


def test_a_single_file_or_a_bare_folder_called_apex_is_not_nvidias(install: Install, tmp_path: Path) -> None:
    install(apex=FAILING)
    assert apex_kind() == "foreign"
    (tmp_path / "apex.py").unlink()
    (tmp_path / "apex").mkdir()
    importlib.invalidate_caches()
    assert apex_kind() == "foreign"


def test_torch_can_be_asked_for_whatever_is_installed(install: Install) -> None:
    nvidia(install)
    assert choose_fused("torch", True) == FusedOps("torch (asked for)")


def test_nvidias_apex_is_taken_on_a_gpu(install: Install) -> None:
    nvidia(install)
    install(amp_C="")
    assert apex_kind() == "nvidia"
    for choice in ("auto", "apex"):
        fused = choose_fused(choice, True)
        assert fused.note == "NVIDIA apex"
        assert fused.norms is not None and fused.norms.__name__ == "apex.normalization.fused_layer_norm"
        assert fused.multi_tensor is not None and fused.multi_tensor.__name__ == "amp_C"


def test_nvidias_apex_is_left_alone_without_a_gpu(install: Install) -> None:
    nvidia(install, norm=FAILING)
    assert choose_fused("auto", False) == FusedOps("torch (there is no GPU)")
    with pytest.raises(ValueError, match="--fused apex: there is no GPU; "):
        choose_fused("apex", False)


def test_nvidias_apex_without_its_extensions_is_said(install: Install) -> None:
    nvidia(install)
    note = choose_fused("auto", True).note
    assert note == "torch (NVIDIA's apex is installed without its CUDA extensions (No module named 'amp_C'))"
    with pytest.raises(ValueError, match="without its CUDA extensions"):
        choose_fused("apex", True)


def test_tensors_of_the_cpu_never_go_to_apex(install: Install) -> None:
    nvidia(install)
    install(amp_C="")
    fused = choose_fused("auto", True)
    x, weight, bias = torch.randn(3, 8), torch.randn(8), torch.randn(8)
    y = torch.randn(3, 8)
    assert torch.equal(fused.add_norm(x, y, weight, bias, 1e-5), F.layer_norm(x + y, (8,), weight, bias, 1e-5))
    assert fused.squared_norms([torch.ones(4)]).tolist() == [4.0]
    fused.adamw_(*[[torch.zeros(4)] for _ in range(4)], AdamStep(0.1, (0.9, 0.999), 1e-8, 0.0, 1))


def test_add_norm_by_hand() -> None:
    x, y = torch.tensor([[0.0, 4.0]], dtype=torch.float64), torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    weight, bias = torch.tensor([2.0, 3.0]).double(), torch.tensor([10.0, 20.0]).double()
    assert FusedOps("torch").add_norm(x, y, weight, bias, eps=0.0).tolist() == [[8.0, 23.0]]  # mean 2, variance 1


class Recorder:
    """Stands for apex's `amp_C`: keeps what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def multi_tensor_l2norm(self, chunk: int, flag: torch.Tensor, lists: list, per_tensor: bool) -> tuple:
        assert per_tensor and flag.tolist() == [0] and chunk > 0
        return None, torch.stack([torch.linalg.vector_norm(tensor) for tensor in lists[0]])

    def multi_tensor_adam(self, *arguments: object) -> None:
        self.calls.append(arguments)


def test_tensors_of_a_gpu_go_to_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the argument order of apex's own FusedAdam: gradients, parameters, averages, squares."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    fused = FusedOps("apex", multi_tensor=Recorder())
    assert fused.squared_norms([torch.tensor([3.0, 4.0]), torch.ones(2)]).tolist() == pytest.approx([25.0, 2.0])
    p, g, m, v = ([torch.full((2,), float(number))] for number in range(4))
    fused.adamw_(p, g, m, v, AdamStep(0.1, (0.8, 0.9), 1e-7, 0.2, 5))
    _, flag, lists, *numbers = fused.multi_tensor.calls[0]
    assert flag.tolist() == [0] and [tensors[0][0].item() for tensors in lists] == [1.0, 0.0, 2.0, 3.0]
    assert numbers == [0.1, 0.8, 0.9, 1e-7, 5, 1, 1, 0.2]
