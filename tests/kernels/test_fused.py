"""`--fused`: which apex is installed, if any, and what is said about it. Packages are made up in a folder."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron_allattn.kernels.fused import FusedOps, apex_kind, choose_fused

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
    assert torch.equal(fused.layer_norm(x, weight, bias, 1e-5), F.layer_norm(x, (8,), weight, bias, 1e-5))
    assert fused.squared_norm([torch.ones(4)]).item() == 4.0


def test_layer_norm_and_squared_norm_by_hand() -> None:
    fused = FusedOps("torch")
    x = torch.tensor([[1.0, 3.0]], dtype=torch.float64)  # mean 2, variance 1
    found = fused.layer_norm(x, torch.tensor([2.0, 3.0]).double(), torch.tensor([10.0, 20.0]).double(), eps=0.0)
    assert found.tolist() == [[8.0, 23.0]]
    squares = fused.squared_norm([torch.tensor([3.0, 4.0]), torch.full((2, 2), 2.0)])
    assert squares.item() == 41.0 and squares.dtype == torch.float64
    big = torch.full((10,), 300.0, dtype=torch.float16)  # its squares are beyond float16
    assert fused.squared_norm([big]).item() == 900_000.0
