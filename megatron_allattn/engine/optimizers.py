"""Adagrad as the paper's code has it, and Adam, for whole parameters and for ZeRO's flat partitions alike.

Neither keeps a step count: whoever steps it sets `lr` (and Adam's `step`, the number of this update, from 1) in every
parameter group first. State is elementwise and has the shape of what it belongs to, so that a checkpoint can
hold it as logical tensors. Spans are clamped to [0, 1] here because clamping is elementwise too.

They derive from `torch.optim.Optimizer` on purpose: DeepSpeed silently replaces subclasses of `torch.optim.Adagrad`.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megatron_allattn.config import OptimizerConfig
from megatron_allattn.kernels import multi_tensor
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.kernels.multi_tensor import AdamStep
from megatron_allattn.model.network import Network
from megatron_allattn.model.parameter_groups import is_sharded, parameter_groups
from megatron_allattn.parallel.collectives import all_reduce
from megatron_allattn.parallel.groups import ALONE, Group


class _Optimizer(torch.optim.Optimizer):
    """What both share: eager state, the clamp of spans."""

    state_names: tuple[str, ...]

    def ensure_state(self, tensors: Iterable[Tensor]) -> None:
        """Give every tensor its (zero) state now rather than at the first step."""
        for tensor in tensors:
            for name in self.state_names:
                if name not in self.state[tensor]:
                    self.state[tensor][name] = torch.zeros_like(tensor, memory_format=torch.preserve_format)

    def _work(self) -> list[tuple[dict[str, Any], list[Tensor], list[Tensor]]]:
        """(group, tensors, gradients) of every group that has gradients."""
        work = []
        for group in self.param_groups:
            tensors = [tensor for tensor in group["params"] if tensor.grad is not None]
            if tensors:
                self.ensure_state(tensors)
                work.append((group, tensors, [tensor.grad for tensor in tensors]))
        return work

    def _states(self, tensors: list[Tensor], name: str) -> list[Tensor]:
        return [self.state[tensor][name] for tensor in tensors]

    @staticmethod
    def _clamp(group: dict[str, Any], tensors: list[Tensor]) -> None:
        if group["span"]:
            torch._foreach_clamp_min_(tensors, 0.0)
            torch._foreach_clamp_max_(tensors, 1.0)


class Adagrad(_Optimizer):
    """Adagrad (Duchi et al. 2011) whose step, per logical tensor, is scaled by min(1, clip / ‖g‖).

        sum ← sum + g²          p ← p − lr · min(1, clip / (‖g‖ + 1e-10)) · g / (√sum + 1e-10)

    The accumulator takes the raw gradient, as in the paper's published code. ‖g‖ is the norm of the whole logical
    tensor: partial squares are summed over `partition` (the ranks that hold the rest of a ZeRO partition) and, for
    sharded tensors, over `tensor`, each in one all-reduce for all tensors of a call. clip = 0 turns it off. With a
    clip, every group holds exactly one tensor. weight decay: g ← g + decay · p first, as in `torch.optim.Adagrad`.
    """

    state_names = ("sum",)

    def __init__(
        self,
        groups: list[dict[str, Any]],
        clip: float,
        weight_decay: float,
        tensor: Group,
        partition: Group,
        fused: FusedOps,
    ) -> None:
        assert clip == 0.0 or all(len(group["params"]) == 1 for group in groups)
        super().__init__(groups, {"lr": 0.0})
        self.clip, self.weight_decay, self.fused = clip, weight_decay, fused
        self.tensor_group, self.partition = tensor, partition

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        work = self._work()
        for group, tensors, grads in work:
            if group["decay"] and self.weight_decay:
                grads[:] = list(torch._foreach_add(grads, tensors, alpha=self.weight_decay))
        scales = self._scales(work) if self.clip else [1.0] * len(work)
        tensors, grads, rates = [], [], []
        for (group, own, gradients), scale in zip(work, scales, strict=True):
            tensors += own
            grads += gradients
            rates += [group["lr"] * scale] * len(own)
        if tensors:
            multi_tensor.adagrad_(tensors, grads, self._states(tensors, "sum"), rates, eps=1e-10)
        for group, own, _ in work:
            self._clamp(group, own)

    def _scales(self, work: list[tuple[dict[str, Any], list[Tensor], list[Tensor]]]) -> list[float]:
        """min(1, clip / ‖g‖) of every group. One read by the host."""
        if not work:
            return []
        squares = self.fused.squared_norms([grads[0] for _, _, grads in work])
        all_reduce(squares, self.partition)
        sharded = torch.tensor([group["sharded"] for group, _, _ in work], device=squares.device)
        if self.tensor_group.size > 1 and bool(any(group["sharded"] for group, _, _ in work)):
            squares[sharded] = all_reduce(squares[sharded], self.tensor_group)
        return (self.clip / (squares.sqrt() + 1e-10)).clamp(max=1.0).tolist()


class Adam(_Optimizer):
    """Adam (Kingma & Ba 2015) with decoupled weight decay (Loshchilov & Hutter 2019).

    The global clip is applied before it, by the engine. Bias correction uses the group's `step`.
    """

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        groups: list[dict[str, Any]],
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        fused: FusedOps,
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "step": 1})
        self.betas, self.eps, self.weight_decay, self.fused = betas, eps, weight_decay, fused

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group, tensors, grads in self._work():
            averages, squares = self._states(tensors, "exp_avg"), self._states(tensors, "exp_avg_sq")
            decay = self.weight_decay if group["decay"] else 0.0
            update = AdamStep(group["lr"], self.betas, self.eps, decay, group["step"])
            self.fused.adamw_(tensors, grads, averages, squares, update)
            self._clamp(group, tensors)


Optimizer = Adagrad | Adam


def build_optimizer(
    config: OptimizerConfig, network: Network, *, tensor: Group, partition: Group, fused: FusedOps
) -> Optimizer:
    """The run's optimizer. `partition`: the ranks over which ZeRO cuts its flat buffers (ALONE without ZeRO)."""
    if config.optimizer == "adagrad":
        groups = parameter_groups(network, one_tensor_each=config.clip_grad > 0)
        return Adagrad(groups, config.clip_grad, config.weight_decay, tensor, partition, fused)
    groups = parameter_groups(network, one_tensor_each=False)
    betas = (config.adam_beta1, config.adam_beta2)
    return Adam(groups, betas, config.adam_eps, config.weight_decay, fused)


def is_counted(parameter: nn.Parameter) -> bool:
    """Whether this stage counts the tensor in norms; one that several stages hold is counted on the first of them.

    By the mark that DeepSpeed's pipeline has for it.
    """
    return not getattr(parameter, "ds_pipe_replicated", False)


def sum_of_squares(
    gradients: list[tuple[nn.Parameter, Tensor]], tensor: Group, fused: FusedOps, device: torch.device
) -> Tensor:
    """What these gradients add to the square of the norm of all, float64 scalar.

    What the tensor group holds several times is counted once, by a share of each rank of it: so a copy that is not
    finite shows on whichever rank.
    """
    counted = [(parameter, gradient) for parameter, gradient in gradients if is_counted(parameter)]
    if not counted:
        return torch.zeros((), dtype=torch.float64, device=device)
    shares = [1.0 if is_sharded(parameter) else 1.0 / tensor.size for parameter, _ in counted]
    squares = fused.squared_norms([gradient for _, gradient in counted])
    return squares @ torch.tensor(shares, dtype=torch.float64, device=device)


def own_gradients(network: Network) -> list[tuple[nn.Parameter, Tensor]]:
    """Every parameter that has a gradient, with it."""
    return [(parameter, parameter.grad) for parameter in network.parameters() if parameter.grad is not None]


def gradient_norm(
    network: Network, tensor: Group, fused: FusedOps, pipeline: Group = ALONE, loss: Tensor | None = None
) -> float:
    """Norm of all gradients as logical tensors (replicated ones counted once), equal on all ranks.

    loss: equal over the replicas; where it is not finite on any rank, nor is the norm.
    """
    device = next(network.parameters()).device
    square = sum_of_squares(own_gradients(network), tensor, fused, device)
    if loss is not None:
        square = square + 0.0 * loss
    return all_reduce(all_reduce(square, tensor), pipeline).sqrt().item()


def clip_gradients(network: Network, norm: float, clip: float) -> None:
    """Scale all gradients by min(1, clip / (norm + 1e-6)), as torch and DeepSpeed's ZeRO do."""
    scale = clip / (norm + 1e-6)
    if not scale >= 1.0:  # a norm that is not finite scales too
        torch._foreach_mul_([p.grad for p in network.parameters() if p.grad is not None], scale)
