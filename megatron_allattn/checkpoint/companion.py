"""The JSON file that goes with a checkpoint of the paper's code: its vocabulary, and what the run was.

Either a list of tokens, in the order of their ids, or an object with the list under `vocabulary` and, if it is known,
the configuration under `config`; docs/reference_cases.md has its keys. What it says must fit the checkpoint.
"""

from pathlib import Path
from typing import Any

from megatron_allattn.config import ModelConfig, usage_error
from megatron_allattn.config.json_files import MAX_STATE_BYTES, read_json

_FIX = "give the JSON file that belongs to the checkpoint"


def read_companion(path: Path) -> dict[str, Any]:
    """The object in the file (of a list: with it under `vocabulary`). Raises UsageError: no such JSON file."""
    content = read_json("file", path, _FIX, MAX_STATE_BYTES)  # a state.json is one
    if isinstance(content, list):
        return {"vocabulary": content}
    if not isinstance(content, dict):
        raise usage_error("file", path, "holds neither a list nor an object", _FIX)
    return content


def check_vocabulary_size(path: Path, found: int, vocab_size: int) -> None:
    """UsageError unless a vocabulary has the checkpoint's size."""
    if found != vocab_size:
        rule = f"has a vocabulary of {found} tokens, the checkpoint one of {vocab_size}"
        raise usage_error("file", path, rule, _FIX)


def check_companion(path: Path, content: dict[str, Any], model: ModelConfig, vocab_size: int) -> None:
    """Hold vocabulary and configuration, where they are given, against the model. Raises UsageError."""
    vocabulary, config = content.get("vocabulary"), content.get("config", {})
    if not isinstance(config, dict):
        raise usage_error("file", path, "its config is not an object", _FIX)
    if vocabulary is not None:
        if not isinstance(vocabulary, list) or not all(isinstance(token, str) for token in vocabulary):
            raise usage_error("file", path, "its vocabulary is not a list of texts", _FIX)
        check_vocabulary_size(path, len(vocabulary), vocab_size)
    if config.get("span_ramp", model.span_ramp) != model.span_ramp and model.adaptive_span:
        ramp = config["span_ramp"]
        raise usage_error("--span-ramp", model.span_ramp, f"{path} says {ramp}", f"give --span-ramp {ramp}")
    known: dict[str, Any] = {
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_layers": model.num_layers,
        "persistent_memory_size": model.persistent_memory_size,
        "feed_forward_size": model.feed_forward_size,
        "max_span": model.max_attention_span,
        "adaptive_span": model.adaptive_span,
        "adaptive_io": bool(model.cutoffs),
    }
    if model.cutoffs:
        known["cutoffs"], known["div_value"] = list(model.cutoffs), model.adaptive_div_value
        known["tied"] = not model.untie_embeddings_and_output_weights
    for name, value in known.items():
        if config.get(name, value) != value:
            raise usage_error("file", path, f"says {name} {config[name]}, the checkpoint {value}", _FIX)
