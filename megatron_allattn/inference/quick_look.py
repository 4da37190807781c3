"""The loss of a checkpoint on the first validation tokens of its data, by one process on a CPU: a look, not a score.

tools/evaluate.py scores a whole split, at any layout; this is for a tool that says what it did to a model.
"""

from pathlib import Path

import torch

from megatron_allattn.config import DataConfig
from megatron_allattn.data.dataset import open_dataset
from megatron_allattn.inference.model import load_model
from megatron_allattn.inference.scoring import score
from megatron_allattn.parallel.groups import single_process_groups
from megatron_allattn.training.resume import check_data

TOKENS = 8193
STREAMS = 8


def validation_loss(path: Path, data: DataConfig) -> tuple[float, int]:
    """Nats per prediction of a run folder's newest step, or of a step folder, and how many predictions.

    The first 8,193 validation tokens of `data`, each but the first predicted once with its full context; fewer where
    the split has fewer. Raises UsageError: no such data, of another tokenizer, or the split has less than two tokens.
    """
    groups, device = single_process_groups(), torch.device("cpu")
    dataset = open_dataset(data)
    model = load_model(path, groups, device, torch.float32)
    check_data(data.data_path, dataset, model.step_folder, model.state, same_text=False)
    length = model.run.training.seq_length
    tokens = dataset.valid[:TOKENS]
    found = score(model.network, groups, tokens, num_streams=STREAMS, block_length=length, device=device)
    return found.mean_nats, found.predictions
