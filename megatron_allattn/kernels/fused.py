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

from megatron_allattn.kernels import multi_tensor
from megatron_allattn.kernels.multi_tensor import AdamStep

CHUNK = 2048 * 32  # elements that a thread block of apex's multi-tensor kernels takes at a time, as in apex


@dataclass(frozen=True)
class FusedOps:
    """The chosen implementations. `note` says in one line what was chosen and why."""

    note: str
    norms: ModuleType | None = None  # apex.normalization.fused_layer_norm
    multi_tensor: ModuleType | None = None  # amp_C

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """LayerNorm(x + y) over the last dimension, of a residual stream and what a sublayer adds to it."""
        if self.norms is not None and x.is_cuda:
            return self.norms.fused_layer_norm_affine(x + y, weight, bias, weight.shape, eps)
        return F.layer_norm(x + y, weight.shape, weight, bias, eps)

    def squared_norms(self, tensors: list[Tensor]) -> Tensor:
        """Sum of the squares of each tensor's elements, float64 [n] on their device."""
        if self.multi_tensor is not None and tensors[0].is_cuda:
            _, norms = self.multi_tensor.multi_tensor_l2norm(CHUNK, self._no_overflow(tensors), [tensors], True)
            return norms.double().square()
        return multi_tensor.squared_norms(tensors)

    def adamw_(
        self,
        tensors: list[Tensor],
        grads: list[Tensor],
        averages: list[Tensor],
        squares: list[Tensor],
        update: AdamStep,
    ) -> None:
        """One step of Adam for all tensors."""
        if self.multi_tensor is None or not tensors[0].is_cuda:
            multi_tensor.adamw_(tensors, grads, averages, squares, update)
            return
        lists = [[grad.contiguous() for grad in grads], tensors, averages, squares]
        numbers = (update.lr, *update.betas, update.eps, update.step)
        decoupled = corrected = 1
        self.multi_tensor.multi_tensor_adam(
            CHUNK, self._no_overflow(tensors), lists, *numbers, decoupled, corrected, update.weight_decay
        )

    @staticmethod
    def _no_overflow(tensors: list[Tensor]) -> Tensor:
        """The flag by which apex's kernels are told to do nothing."""
        return torch.zeros(1, dtype=torch.int32, device=tensors[0].device)


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
