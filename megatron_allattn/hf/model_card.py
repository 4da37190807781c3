"""The model card, README.md: what the model is, how to load it, how it was trained and what it scores.

Its first lines are YAML, as the Hugging Face Hub reads it. The licence is the user's to give.
"""

import json
from dataclasses import dataclass
from math import prod
from typing import Any

from megatron_allattn.checkpoint.conversion import SavedRun
from megatron_allattn.config import ModelConfig
from megatron_allattn.config.errors import flag
from megatron_allattn.data.tokenizers import NullTokenizer, SentencePieceTokenizer, Tokenizer

PAPER = "Sukhbaatar, Grave, Lample, Jégou and Joulin, *Augmenting Self-attention with Persistent Memory*, 2019"
PAPER_ID = "1907.01470"
_SECTIONS = ("model", "optimizer", "training")


@dataclass(frozen=True)
class Told:
    """What a run does not say of itself. license: as the Hub spells it; evaluation: the card of tools/evaluate.py."""

    license: str | None = None
    evaluation: str | None = None


def model_card(saved: SavedRun, tokenizer: Tokenizer, told: Told, oldest: str) -> str:
    """The card of a run's step. oldest: the oldest transformers that loads it."""
    name = saved.run.recipe or saved.step_folder.resolve().parents[1].name
    parts = [
        _front_matter(told.license),
        f"# {name}",
        _what_it_is(saved, tokenizer),
        "## Use",
        _use(tokenizer, oldest),
        "## Evaluation",
        _evaluation(told.evaluation),
        "## Training",
        _training(saved),
        "## Reference",
        f"{PAPER}, [arXiv:{PAPER_ID}](https://arxiv.org/abs/{PAPER_ID}).",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(license: str | None) -> str:
    values: dict[str, Any] = {
        **({"license": license} if license is not None else {}),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["all-attention", "persistent-memory", f"arxiv:{PAPER_ID}"],
    }
    lines = [f"{key}: {json.dumps(value)}" for key, value in values.items()]  # JSON is YAML
    return "\n".join(["---", *lines, "---"])


def _what_it_is(saved: SavedRun, tokenizer: Tokenizer) -> str:
    model, infos = saved.run.model, saved.weights.infos.values()
    total = sum(prod(info.shape) for info in infos)
    persistent = sum(prod(info.shape) for info in infos if ".persistent." in info.name)
    return (
        f"{_kind(model)} of {total:,} parameters, {persistent:,} of them in persistent vectors: {model.num_layers} "
        f"layers of width {model.hidden_size} with {model.num_attention_heads} heads, which look back at most "
        f"{model.max_attention_span} tokens{', each by a span of its own' if model.adaptive_span else ''}. "
        f"{tokenizer.vocab_size:,} tokens: {_tokens(tokenizer)}."
    )


def _kind(model: ModelConfig) -> str:
    if model.variant == "all-attn":
        size = model.persistent_memory_size
        return f"An all-attention language model (no feed-forward sublayers, {size} persistent vectors per head)"
    return f"A language model of variant `{model.variant}`, a baseline or an ablation of the all-attention model,"


def _tokens(tokenizer: Tokenizer) -> str:
    if isinstance(tokenizer, NullTokenizer):
        return "bare numbers, the folder has no tokenizer"
    line_end = "no token" if tokenizer.newline_id is None else "a token, eos_token"
    return f"{tokenizer.name}, a line end is {line_end}"


def _use(tokenizer: Tokenizer, oldest: str) -> str:
    more = ", sentencepiece" if isinstance(tokenizer, SentencePieceTokenizer) else ""
    own = not isinstance(tokenizer, NullTokenizer)
    names = "AutoModelForCausalLM, AutoTokenizer" if own else "AutoModelForCausalLM"
    load = 'from_pretrained("FOLDER", trust_remote_code=True)'
    lines = [*([] if own else ["import torch"]), f"from transformers import {names}", ""]
    lines.append(f"model = AutoModelForCausalLM.{load}")
    if own:
        lines += [
            f"tokenizer = AutoTokenizer.{load}",
            'output = model.generate(**tokenizer("a text", return_tensors="pt"), max_new_tokens=100)',
            "print(tokenizer.decode(output[0]))",
        ]
    else:
        lines.append("output = model.generate(torch.tensor([[0, 1]]), max_new_tokens=100)")
    code = "\n".join(["```python", *lines, "```"])
    return f"Needs transformers {oldest} or newer{more} and torch; the code is in this folder.\n\n{code}"


def _evaluation(card: str | None) -> str:
    if card is None:
        return (
            "Not given: `tools/evaluate.py --load RUN --json CARD` measures it, `--evaluation-card CARD` adds it here."
        )
    return f"As `tools/evaluate.py` printed it:\n\n```text\n{card}\n```"


def _training(saved: SavedRun) -> str:
    state, values = saved.state, saved.run.to_dict()
    found = state.get("data_sha256")
    data = f", on data of fingerprint `{found}` (of its tokenizer and its files' SHA-256)" if found else ""
    versions = ", ".join(f"{name} {version}" for name, version in (state.get("versions") or {}).items())
    head = f"{state['step']:,} steps of {saved.run.training.train_iters:,}, {saved.progress.tokens:,} tokens{data}"
    source = state.get("source") or {}
    if source.get("step"):
        head = f"{source['step']:,} steps before it was converted (from {source['format']}), and after that {head}"
    rows = [
        f"| `{flag(name)}` | {json.dumps(value)} |"
        for section in _SECTIONS
        for name, value in values[section].items()
        if value is not None
    ]
    table = "\n".join(["| flag of pretrain.py | value |", "|---|---|", *rows])
    return f"{head}{f'. Trained with {versions}' if versions else ''}.\n\n{table}"
