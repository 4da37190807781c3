"""Training in PyTorch alone: any precision, one process or a TP × DP grid without ZeRO.

It is what runs where DeepSpeed is absent (the GPU check), in float64 (the comparisons with recorded numbers), and what
the DeepSpeed engine is compared with. In bfloat16 and float16 the update acts on float32 masters.
"""

import math

import torch
from torch import Tensor, nn

from megatron_allattn.config import RunConfig
from megatron_allattn.engine.interface import Engine
from megatron_allattn.engine.optimizers import build_optimizer
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.attention import BlockContext
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.collectives import all_reduce
from megatron_allattn.parallel.groups import ALONE, Groups


class PlainEngine(Engine):
    """See `Engine`. Gradients are averaged over the data group by one all-reduce of them all."""

    def __init__(
        self,
        network: Network,
        run: RunConfig,
        groups: Groups,
        device: torch.device,
        dtype: torch.dtype,
        fused: FusedOps,
    ) -> None:
        super().__init__(network, run, groups, device, dtype, fused)
        half = dtype in (torch.bfloat16, torch.float16)
        network.to(device=device, dtype=torch.float32 if half else dtype)
        self.optimizer = build_optimizer(run.optimizer, network, tensor=groups.tensor, partition=ALONE, fused=fused)
        # What the optimizer updates: the parameters themselves, or float32 masters of a half-precision network.
        self._masters = {p: nn.Parameter(p.detach().clone()) if half else p for p in network.parameters()}
        for group in self.optimizer.param_groups:
            group["params"] = [self._masters[p] for p in group["params"]]
        self.optimizer.ensure_state(self._masters.values())
        network.to(dtype)

    @property
    def state_names(self) -> tuple[str, ...]:
        return self.optimizer.state_names

    def _loss_scale(self) -> float:
        return 1.0

    def _forward(self, inputs: Tensor, targets: Tensor, context: BlockContext) -> Tensor:
        return self.network(inputs, context, targets)

    def _run_micro_batch(self, inputs: Tensor, targets: Tensor, context: BlockContext) -> Tensor:
        loss = self._forward(inputs, targets, context).mean()
        (loss / self.num_slots).backward()
        if context.cache is self.slots[-1]:
            self._average_gradients()
        return loss.detach()

    def _average_gradients(self) -> None:
        grads = [p.grad for p in self.network.parameters() if p.grad is not None]
        if self.groups.data.size > 1:
            flat = all_reduce(torch.cat([grad.flatten() for grad in grads]), self.groups.data) / self.groups.data.size
            parts = flat.split([grad.numel() for grad in grads])
            torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])

    def _optimizer_step(self, lr: float, step: int) -> float:
        norm = self._whole_norm()
        for group in self.optimizer.param_groups:
            group.update(lr=lr, step=step - self.skipped)
        for parameter, master in self._masters.items():
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.to(master.dtype)
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in self._masters.items():
                if master is not parameter:
                    parameter.copy_(master)
                    master.grad = None
        self.network.zero_grad(set_to_none=True)
        self._judge(not math.isfinite(norm), smallest=False)
        return norm

    def _master(self, parameter: nn.Parameter) -> Tensor:
        return self._masters[parameter].detach()

    def _set_master(self, parameter: nn.Parameter, local: Tensor) -> None:
        with torch.no_grad():
            self._masters[parameter].copy_(local)
            parameter.copy_(local)

    def _state(self, parameter: nn.Parameter, name: str) -> Tensor:
        return self.optimizer.state[self._masters[parameter]][name]

    def _set_state(self, parameter: nn.Parameter, name: str, local: Tensor) -> None:
        self._state(parameter, name).copy_(local)

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        assert parameter.grad is not None
        return parameter.grad
