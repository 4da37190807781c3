"""What a recipe is: a function that returns a whole `RunConfig`, and the facts that belong to it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_allattn.config.optimizer import OptimizerConfig
from megatron_allattn.config.parameters import Parameters, count_parameters
from megatron_allattn.config.run import RunConfig

BYTES = "byte --input FILE"
"""Arguments of tools/prepare_data.py for any text."""


def until_plateau(optimizer: OptimizerConfig) -> OptimizerConfig:
    """The optimizer with the paper's end of training, and what the paper leaves open of it (see characters.py)."""
    return replace(
        optimizer,
        lr_decay_style="plateau",
        plateau_patience=20,
        plateau_threshold=1e-4,
        plateau_iters=20_000,
    )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A named configuration; call it to get the `RunConfig`, which flags may then override."""

    name: str
    """What --recipe takes."""

    about: str
    """One line for people."""

    make: Callable[[], RunConfig]
    """The configuration."""

    vocab_size: int
    """Tokens of the corpus it is meant for; parameters are counted with it."""

    gpus: int
    """Processes it was sized for."""

    prepare: str = BYTES
    """How its data is made: the arguments of tools/prepare_data.py, without the prefix."""

    paper_millions: int | None = None
    """Parameters that the paper gives, in millions."""

    paper_dev: float | None = None
    """The paper's result on the development set: bits per character, or perplexity of words."""

    paper_test: float | None = None
    """The same on the test set."""

    def __call__(self) -> RunConfig:
        return replace(self.make(), recipe=self.name)

    @property
    def parameters(self) -> Parameters:
        """How many weights it trains."""
        return count_parameters(self.make().model, self.vocab_size)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all streams in one step."""
        training = self.make().training
        return training.global_batch_size * training.seq_length
