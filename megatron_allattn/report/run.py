"""A run folder as a report sees it: configuration, metrics, observations, outcome. Reads only, and needs no torch."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_allattn.checkpoint.folder import find_latest
from megatron_allattn.checkpoint.run_folder import CONFIG, Outcome, read_outcome
from megatron_allattn.config import RECIPES, RunConfig
from megatron_allattn.config.errors import UsageError, one_line, usage_error
from megatron_allattn.config.json_files import MAX_STATE_BYTES, read_json_object
from megatron_allattn.config.parameters import Parameters, count_parameters
from megatron_allattn.config.recipes import Recipe
from megatron_allattn.report.metrics import Metrics, read_metrics
from megatron_allattn.report.observations import Observations, read_observations


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything a report shows of one run. name: that of its folder; outcome: None while it runs, or where nothing was
    left to tell; vocab_size: None before the first checkpoint, which knows it."""

    name: str
    folder: Path
    config: RunConfig
    metrics: Metrics
    observations: Observations
    outcome: Outcome | None
    vocab_size: int | None

    @property
    def recipe(self) -> Recipe | None:
        return RECIPES.get(self.config.recipe or "")

    @property
    def parameters(self) -> Parameters | None:
        return None if self.vocab_size is None else count_parameters(self.config.model, self.vocab_size)

    @property
    def papers(self) -> dict[str, float]:
        """The paper's results, dev and test, in the run's unit, where its recipe is of a row that has them."""
        recipe = self.recipe
        if recipe is None or self.metrics.unit != _unit_of(recipe):
            return {}
        found = {"dev": recipe.paper_dev, "test": recipe.paper_test}
        return {name: value for name, value in found.items() if value is not None}

    def in_unit(self, loss: Any) -> Any:
        """Nats per token, a number or an array, in the run's unit."""
        return from_nats(loss, self.metrics.unit)

    @property
    def seconds_in_steps(self) -> float | None:
        """How long all training steps took, without evaluations, saves and starts; None where it is unknown."""
        rates = self.metrics.train["tokens_per_second"].known.values
        rates = rates[rates > 0]
        training = self.config.training
        tokens = training.global_batch_size * training.seq_length
        return float((tokens / rates).sum()) if len(rates) else None


def from_nats(loss: Any, unit: str) -> Any:
    """bpc: loss / ln 2; ppl: exp(loss), of at most 700 as in metrics.jsonl; nats: as it is."""
    if unit == "bpc":
        return loss / math.log(2)
    return np.exp(np.minimum(loss, 700.0)) if unit == "ppl" else loss


def read_run(folder: Path) -> Run:
    """Read a run folder, of a run in any state. Raises UsageError naming the file that is none of a run."""
    if not (folder / CONFIG).exists():
        what = f"has no {CONFIG}" if folder.is_dir() else "is no folder"
        raise usage_error("run folder", folder, what, "name the --save folder of a run")
    config = read_json_object("file", folder / CONFIG, "name the --save folder of a run")
    return Run(
        name=one_line(folder.resolve().name) or "run",
        folder=folder,
        config=RunConfig.from_dict(config),
        metrics=read_metrics(folder),
        observations=read_observations(folder),
        outcome=read_outcome(folder),
        vocab_size=_vocab_size(folder),
    )


def _vocab_size(folder: Path) -> int | None:
    """What the newest checkpoint says; None where there is none (that it is damaged is not a report's to say)."""
    try:
        step_folder, _ = find_latest(folder)
        state = read_json_object("file", step_folder / "state.json", "", MAX_STATE_BYTES)
    except UsageError:
        return None
    size = state.get("vocab_size")
    return size if type(size) is int and size > 0 else None


def _unit_of(recipe: Recipe) -> str:
    """The unit of the paper's numbers: perplexity of words, else bits per character."""
    return "ppl" if recipe.prepare.startswith("wikitext") else "bpc"
