"""How the weights move: the optimizer, the learning rate over time, and clipping."""

from dataclasses import dataclass
from typing import Literal

from megatron_allattn.config.checks import LARGEST, check_range, conform_types
from megatron_allattn.config.errors import usage_error


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer: Adam, or the paper's Adagrad with its clip per tensor."""

    optimizer: Literal["adam", "adagrad"] = "adam"
    """Adam with a clip of the global norm, or the paper's Adagrad whose step is clipped tensor by tensor."""

    lr: float = 1e-3
    """Learning rate after the warm-up."""

    lr_decay_style: Literal["constant", "linear", "cosine", "plateau"] = "constant"
    """Course of the rate after the warm-up; plateau: a tenth of it once validation stops improving, as in the paper."""

    lr_decay_iters: int | None = None
    """Step at which the decay arrives at --min-lr, the last one if left out; plateau: its latest start, if given."""

    min_lr: float = 0.0
    """Learning rate at the end of the decay."""

    plateau_patience: int = 5
    """Evaluations in a row without a better validation loss after which the plateau is reached."""

    plateau_threshold: float = 1e-3
    """Nats per token by which a validation loss must be below the best so far to count as better."""

    plateau_iters: int = 20_000
    """Steps at a tenth of the rate after the plateau; then the run ends."""

    lr_warmup_iters: int = 0
    """Steps over which the learning rate grows linearly from 0."""

    clip_grad: float = 1.0
    """Largest gradient norm: of all gradients together with adam, of each tensor with adagrad; 0 is off."""

    weight_decay: float = 0.0
    """Weight decay: decoupled from the gradient with adam, added to it with adagrad; 0 is off."""

    adam_beta1: float = 0.9
    """Decay of adam's running mean of gradients."""

    adam_beta2: float = 0.999
    """Decay of adam's running mean of squared gradients."""

    adam_eps: float = 1e-8
    """Added to the denominator of adam's step."""

    def __post_init__(self) -> None:
        conform_types(self)
        check_range(self, "lr", above=0)
        check_range(self, "lr_decay_iters", at_least=1, at_most=LARGEST)
        check_range(self, "plateau_patience", at_least=1, at_most=LARGEST)
        check_range(self, "plateau_threshold", at_least=0)
        check_range(self, "plateau_iters", at_least=1, at_most=LARGEST)
        check_range(self, "min_lr", at_least=0)
        check_range(self, "lr_warmup_iters", at_least=0, at_most=LARGEST)
        check_range(self, "clip_grad", at_least=0)
        check_range(self, "weight_decay", at_least=0)
        for name in ("adam_beta1", "adam_beta2"):
            check_range(self, name, at_least=0, below=1)
        check_range(self, "adam_eps", above=0)
        if self.lr_decay_style != "constant" and self.min_lr > self.lr:
            raise usage_error(
                "--min-lr", self.min_lr, f"must not exceed --lr {self.lr}", "lower it or raise the learning rate"
            )
