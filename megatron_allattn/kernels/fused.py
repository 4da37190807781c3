"""NVIDIA's apex where it helps, plain PyTorch elsewhere: `--fused {auto,apex,torch}`.

apex brings a fused LayerNorm, a fused Adam step and multi-tensor norms. It is built from source by those who want it
and never a dependency: the package called `apex` on PyPI is an unrelated web toolkit, which is recognized without being
imported (its import fails for want of other packages).
"""

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class FusedOps:
    """The chosen implementations. `note` says in one line what was chosen and why."""

    note: str
    norms: ModuleType | None = None  # apex.normalization.fused_layer_norm
    multi_tensor: ModuleType | None = None  # amp_C

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """LayerNorm over the last dimension."""
        if self.norms is not None and x.is_cuda:
            return self.norms.fused_layer_norm_affine(x, weight, bias, weight.shape, eps)
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def squared_norm(self, tensors: list[Tensor]) -> Tensor:
        """Sum of the squares of all elements, a float64 scalar on the tensors' device (float32 inside apex)."""
        if self.multi_tensor is not None and tensors[0].is_cuda:
            overflow = torch.zeros(1, dtype=torch.int32, device=tensors[0].device)
            norm, _ = self.multi_tensor.multi_tensor_l2norm(65536, overflow, [tensors], False)
            return norm.double().square().reshape(())
        return torch.stack([torch.linalg.vector_norm(t, dtype=torch.float64).square() for t in tensors]).sum()


def apex_kind() -> str:
    """What `import apex` would bring: "nvidia", "foreign" (PyPI's web toolkit or anything else) or "absent"."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "absent"
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    return "nvidia" if any((folder / "normalization").is_dir() for folder in folders) else "foreign"


def choose_fused(choice: str, cuda: bool) -> FusedOps:
    """The implementations for `--fused` and a device. Raises ValueError when apex is asked for and cannot be had."""
    if choice == "torch":
        return FusedOps("torch (asked for)")
    kind = apex_kind()
    reason = {
        "absent": "NVIDIA's apex is not installed",
        "foreign": "the installed package 'apex' is not NVIDIA's (PyPI's apex is an unrelated web toolkit)",
    }.get(kind, "" if cuda else "there is no GPU")
    if not reason:
        try:
            return FusedOps(
                "NVIDIA apex",
                norms=importlib.import_module("apex.normalization.fused_layer_norm"),
                multi_tensor=importlib.import_module("amp_C"),
            )
        except ImportError as error:
            reason = f"NVIDIA's apex is installed without its CUDA extensions ({error})"
    if choice == "apex":
        raise ValueError(f"--fused apex: {reason}; build apex from NVIDIA's source or use --fused torch")
    return FusedOps(f"torch ({reason})")
