"""DeepSpeed's engine with ZeRO 0-3 over the data group and our own tensor parallelism.

Who does what:

- DeepSpeed averages gradients over the data group, partitions optimizer state (ZeRO ≥ 1), gradients (≥ 2) and
  parameters (3), and, for Adam under ZeRO ≥ 1, clips the global norm. It learns of the tensor group through an `mpu`
  object and the `tensor_model_parallel` mark on parameters.
- The optimizer is ours (`optimizers.py`); the per-tensor clip is part of it.
- In float16 DeepSpeed scales the loss and leaves out a step whose gradient overflows (`loss_scale.py`). In any
  precision it leaves out one whose loss or gradient is not finite on any rank: at ZeRO 1-3 DeepSpeed does, once the
  norm says so, at ZeRO 0 the engine (`finite.py`).
- At ZeRO 0 DeepSpeed reports no gradient norm, and its bfloat16 optimizer ignores the mark: there the norm and the
  global clip are ours in float32, and half precision runs as ZeRO 1, the same arithmetic with the state split.

`gradient_clipping` is always passed: DeepSpeed's own default clips at 1.
"""

import logging
import math
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from megatron_allattn.config import RunConfig, usage_error
from megatron_allattn.config.ds_config import load_deepspeed_json
from megatron_allattn.engine.interface import Engine
from megatron_allattn.engine.loss_scale import SETTINGS, LossScale
from megatron_allattn.engine.optimizers import build_optimizer, sum_of_squares
from megatron_allattn.engine.uncompiled import without_compiler
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.attention import BlockContext
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.collectives import all_reduce
from megatron_allattn.parallel.groups import ALONE, Groups, limit_waiting
from megatron_allattn.parallel.layout import padded_share

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Mpu:
    """What DeepSpeed asks about our process groups (Megatron-LM's names for them)."""

    groups: Groups

    def get_model_parallel_rank(self) -> int:
        return self.groups.tensor.rank

    def get_model_parallel_world_size(self) -> int:
        return self.groups.tensor.size

    def get_model_parallel_group(self) -> Any:
        return self.groups.tensor.handle

    # by their newer names, as its universal checkpoints ask for them
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_rank(self) -> int:
        return self.groups.data.rank

    def get_data_parallel_world_size(self) -> int:
        return self.groups.data.size

    def get_data_parallel_group(self) -> Any:
        return self.groups.data.handle


def import_deepspeed(verbose: bool) -> Any:
    """DeepSpeed, quiet unless `verbose`, without the start-up build of its shared-memory collective.

    That build takes most of a minute on a CPU machine, and a process killed during it leaves a lock on which every
    later run hangs.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    level = logging.INFO if verbose else logging.ERROR
    if not verbose:  # DeepSpeed calls collectives by names that newer releases of torch call deprecated, at every step
        warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    import deepspeed  # noqa: PLC0415  (it must see the environment set above)
    from deepspeed.accelerator import get_accelerator  # noqa: PLC0415

    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(level)
    for handler in logger.handlers:  # they have levels of their own
        handler.setLevel(level)
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None:
        deepspeed.ops.__compatible_ops__[builder.NAME] = False
    return deepspeed


def check_zero_settings(run: RunConfig, world_size: int) -> None:
    """Refuse a `zero_optimization` section that DeepSpeed does not accept: UsageError with file, key and value."""
    import_deepspeed(run.logging.deepspeed_verbose)
    from deepspeed.runtime.zero.config import get_zero_config  # noqa: PLC0415  (after the environment is set)

    try:
        get_zero_config(load_deepspeed_json(run, world_size))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in ("zero_optimization", *first["loc"]))
        source = str(run.parallel.deepspeed_json)
        raise usage_error(source, f"{key} = {first['input']}", first["msg"], "correct the file") from error


class DeepSpeedEngine(Engine):
    """See `Engine`; the default process group is initialized and `groups` are made from it."""

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
        deepspeed = import_deepspeed(run.logging.deepspeed_verbose)
        half = dtype in HALF
        self.zero_stage, settings = self._settings(half)
        partition = groups.data if self.zero_stage else ALONE
        os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
        initial = [parameter.detach().clone() for parameter in network.parameters()] if half else []
        self._deepspeed = deepspeed
        with without_compiler():
            self.optimizer = build_optimizer(
                run.optimizer, network, tensor=groups.tensor, partition=partition, fused=fused
            )
            self.engine = self._initialize(settings)
        limit_waiting(60 * run.parallel.distributed_timeout_minutes, groups)  # it makes groups of its own, without one
        if self.zero_stage in (1, 2):
            self.engine.optimizer.scaled_global_norm = self._norm
            if dtype != torch.float16:  # the norm says it, without collectives of its own
                self.engine.optimizer.check_overflow = lambda partition_gradients=True: None
        elif self.zero_stage == 3:
            self._add_loss_to_norms_of_zero3(self.engine.optimizer)
        if dtype == torch.float16:
            self.loss_scale = LossScale(self.engine.optimizer)
        self._allocate_state()
        # DeepSpeed makes its masters from weights that it has rounded to half precision: give them the exact ones.
        for parameter, value in zip(network.parameters(), initial, strict=half):
            self._set_master(parameter, value)

    def _initialize(self, settings: dict[str, Any]) -> Any:
        """DeepSpeed's engine of the network."""
        engine, *_ = self._deepspeed.initialize(
            model=self.network.to(self.device), optimizer=self.optimizer, config=settings, mpu=Mpu(self.groups)
        )
        return engine

    def _settings(self, half: bool) -> tuple[int, dict[str, Any]]:
        """The ZeRO stage that runs and DeepSpeed's configuration: the JSON's part, and what RunConfig decides."""
        run = self.run
        settings = load_deepspeed_json(run, self.groups.layout.world_size)
        zero = settings.setdefault("zero_optimization", {})
        if half:
            zero["stage"] = max(1, zero.get("stage", 0))  # see the module's docstring
        stage = int(zero.get("stage", 0))
        clips = run.optimizer.optimizer == "adam" and stage > 0
        settings |= {
            "train_batch_size": run.training.global_batch_size,
            "train_micro_batch_size_per_gpu": self.micro_batch_size,
            "gradient_accumulation_steps": self.num_slots,
            "gradient_clipping": run.optimizer.clip_grad if clips else 0.0,
            "bf16": {"enabled": self.dtype == torch.bfloat16, "check_grad_overflow": True},
            "fp16": {"enabled": self.dtype == torch.float16, **SETTINGS},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        return stage, settings

    def _allocate_state(self) -> None:
        """Give the optimizer its state now, so that a checkpoint can be loaded before the first step."""
        zero = self.engine.optimizer
        if self.zero_stage == 0:
            self.optimizer.ensure_state(self.network.parameters())
        elif self.zero_stage == 3:
            self.optimizer.ensure_state(zero.fp32_partitioned_groups_flat)
        else:
            self.optimizer.ensure_state(zero.single_partition_of_fp32_groups)
            zero._lazy_init_hp_params_optimizer_state()

    def _norm(self, norm_type: int = 2) -> Tensor:
        """What DeepSpeed's `scaled_global_norm` is replaced with under ZeRO 1 and 2: the same in one collective.

        DeepSpeed's own has two for every parameter group, of which the stages of a pipeline have different numbers.
        Every element of a logical tensor is counted once in the world: a replicated one by a share of every rank of
        the tensor group, so that a copy that is not finite shows. -1, by which DeepSpeed knows it and leaves out the
        update, where it or any rank's loss is not finite.
        """
        square = sum_of_squares(self._partition_gradients(), self.groups.tensor, self.fused, self.device)
        norm = all_reduce(square + 0.0 * self.mean_loss, self.groups.world).sqrt().float()
        return torch.where(norm.isfinite(), norm, -1.0)

    def _partition_gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Under ZeRO 1 and 2: of this replica's partitions, every parameter with its (part of a) gradient."""
        zero = self.engine.optimizer
        return [
            pair
            for place, group in enumerate(zero.params_in_partition)
            for pair in zip(group, self._own_gradients(zero, place), strict=False)
        ]

    def _add_loss_to_norms_of_zero3(self, zero: Any) -> None:
        """Give DeepSpeed, beside its norms of parameter groups, one that is 0, or not finite where a loss is not."""
        norms_of_groups = zero._get_norm_groups

        def norms() -> list[Any]:
            loss = all_reduce(0.0 * self.mean_loss, self.groups.tensor)
            return [*norms_of_groups(), loss.float()]

        zero._get_norm_groups = norms

    def _own_gradients(self, zero: Any, place: int) -> list[Tensor]:
        """The parts of a parameter group's gradients that this replica updates: of its `params_in_partition`, then
        what fills the partition up."""
        if not zero.cpu_offload:
            return [one for one in zero.averaged_gradients[place] if not getattr(one, "_zero_padding", False)]
        # in place of gradients that have been moved to the host: their norms, which DeepSpeed has kept; 0 where a
        # parameter's is not this replica's
        kept, none = zero.norm_for_param_grads, torch.zeros((), device=self.device)
        return [kept.get(zero.get_param_id(one), none).reshape(1) for one in zero.params_in_partition[place]]

    @property
    def state_names(self) -> tuple[str, ...]:
        return self.optimizer.state_names

    def _loss_scale(self) -> float:
        return self.loss_scale.scale if self.loss_scale else 1.0

    def _local_spans(self) -> Tensor | None:
        if self.zero_stage < 3:
            return super()._local_spans()
        with self._deepspeed.zero.GatheredParameters(self.network.span_parameters()):
            return super()._local_spans()

    def held(self) -> Iterator[tuple[tuple[str, str], Tensor]]:
        for (name, shard), tensor in super().held():
            if self.zero_stage == 3 and isinstance(tensor, nn.Parameter):
                yield (name, f"{shard} (part {self.groups.data.rank})"), tensor.ds_tensor  # type: ignore[attr-defined]
            else:
                yield (name, shard), tensor
        for logical, parameter in self.network.logical_parameters() if self.dtype in HALF else ():
            # of a shard every replica has another part of it; of what several stages hold, the first one's counts
            if logical.shard_dim is None and self._logical[logical] == self.groups.pipeline.rank:
                yield (logical.name, " (master)"), self._master(parameter)

    def _forward(self, inputs: Tensor, targets: Tensor, context: BlockContext) -> Tensor:
        return self.engine(inputs, context, targets)

    def _run_micro_batch(self, inputs: Tensor, targets: Tensor, context: BlockContext) -> Tensor:
        loss = self._forward(inputs, targets, context).mean()
        self.engine.backward(loss)
        if context.cache is not self.slots[-1]:
            self.engine.step()  # between boundaries: DeepSpeed's own counting only
        return loss.detach()

    def _optimizer_step(self, lr: float, step: int) -> float:
        for group in self.optimizer.param_groups:
            group.update(lr=lr, step=step - self.skipped)
        smallest = self.loss_scale is not None and self.loss_scale.smallest
        if self.zero_stage:
            self._take_step()
            norm, left_out = float(self.engine.get_global_grad_norm()), bool(self.engine.optimizer.overflow)
        else:
            norm = self._whole_norm()
            left_out = not math.isfinite(norm)
            self._take_step()
        self._judge(left_out, smallest)
        return norm

    def _take_step(self) -> None:
        self.engine.step()

    def _master(self, parameter: nn.Parameter) -> Tensor:
        if self.zero_stage == 0:
            return parameter.detach()
        return self._deepspeed.utils.safe_get_full_fp32_param(parameter)

    def _set_master(self, parameter: nn.Parameter, local: Tensor) -> None:
        utils = self._deepspeed.utils
        if self.zero_stage == 3:
            with self._deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                parameter.copy_(local)
            utils.safe_set_local_fp32_param(parameter, self._partition(local))
            return
        with torch.no_grad():
            parameter.copy_(local)
        if self.zero_stage:
            utils.safe_set_full_fp32_param(parameter, local.float())

    def _partition(self, local: Tensor) -> Tensor:
        """This data rank's ZeRO 3 partition of a tensor: equal parts of its elements, the last ones padded with zeros.

        DeepSpeed's own `safe_set_full_…` fails on tensors whose elements do not divide by the data group.
        """
        data = self.groups.data
        size = padded_share(local.numel(), data.size)
        flat = nn.functional.pad(local.flatten().float(), (0, size * data.size - local.numel()))
        return flat[data.rank * size : (data.rank + 1) * size]

    def _state(self, parameter: nn.Parameter, name: str) -> Tensor:
        if self.zero_stage == 0:
            return self.optimizer.state[parameter][name]
        return self._deepspeed.utils.safe_get_full_optimizer_state(parameter, name)

    def _set_state(self, parameter: nn.Parameter, name: str, local: Tensor) -> None:
        if self.zero_stage == 0:
            self.optimizer.state[parameter][name].copy_(local)
        elif self.zero_stage == 3:
            self._deepspeed.utils.safe_set_local_optimizer_state(parameter, self._partition(local), name)
        else:
            self._deepspeed.utils.safe_set_full_optimizer_state(parameter, local, name)

    def _own_range(self, parameter: nn.Parameter, state: str | None, order: int) -> tuple[int, Tensor]:
        if self.zero_stage == 0:
            return super()._own_range(parameter, state, order)
        if self.zero_stage == 3:
            utils, size = self._deepspeed.utils, padded_share(parameter.ds_numel, self.groups.data.size)  # type: ignore[attr-defined]
            start = min(self.groups.data.rank * size, parameter.ds_numel)  # type: ignore[attr-defined]
            part = (
                utils.safe_get_local_fp32_param(parameter)
                if state is None
                else utils.safe_get_local_optimizer_state(parameter, state)
            )
            return start, part.flatten()[: parameter.ds_numel - start]  # type: ignore[attr-defined]
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return 0, torch.empty(0)
        return mapping.lp_fragment_address.start, mapping.get_hp_fragment(state).flatten()

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        if self.zero_stage == 0:
            assert parameter.grad is not None
            return parameter.grad
        return self._deepspeed.utils.safe_get_full_grad(parameter)
