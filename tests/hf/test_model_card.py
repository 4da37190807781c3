"""The model card: what the Hub reads of it, and the numbers that it names."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_allattn.data.tokenizers import ByteTokenizer, CharTokenizer, NullTokenizer, Tokenizer
from megatron_allattn.hf.model_card import Told, model_card
from tests.support.saved_runs import MODELS, VOCABULARY, saved_run

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
CHARACTERS = CharTokenizer([chr(97 + number) for number in range(VOCABULARY)])


def card(folder: Path, name: str, tokenizer: Tokenizer, told: Told) -> tuple[dict[str, Any], str]:
    """The YAML of a card, and its text."""
    text = model_card(saved_run(folder / "my run", MODELS[name]), tokenizer, told, "5.20")
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def test_all_of_it(tmp_path: Path) -> None:
    front, body = card(tmp_path, "all-attn", CHARACTERS, Told("apache-2.0", "bits   1.25 per character"))
    assert front["license"] == "apache-2.0" and front["library_name"] == "transformers"
    # of every layer W_q, W_k, W_v, W_o, two of N x K for each of 4 heads, z, and a norm; u; two tables and a bias
    layers = 3 * (4 * 32 * 32 + 2 * 4 * 8 * 8 + 4 + 2 * 32)
    total = layers + 8 * 96 + 2 * VOCABULARY * 32 + VOCABULARY
    assert f"of {total:,} parameters, {3 * 2 * 4 * 8 * 8:,} of them in persistent vectors" in body
    assert body.startswith("\n# my run\n") and "char, a line end is no token" in body
    assert "```text\nbits   1.25 per character\n```" in body
    assert "2 steps of 1,000, 84 tokens" in body and "| `--clip-grad` | 0.5 |" in body
    assert "arxiv.org/abs/1907.01470" in body and "transformers 5.20 or newer and torch" in body


def test_what_is_not_given_is_left_to_the_user(tmp_path: Path) -> None:
    front, body = card(tmp_path, "transformer", NullTokenizer(VOCABULARY), Told())
    assert "license" not in front
    assert "Not given: `tools/evaluate.py" in body
    assert "of variant `transformer`" in body and ", 0 of them in persistent vectors" in body
    assert "AutoTokenizer" not in body and "bare numbers" in body


def test_a_run_that_was_converted_has_had_steps_before(tmp_path: Path) -> None:
    saved = saved_run(tmp_path / "run", MODELS["all-attn"])
    state = saved.state | {"source": {"format": "huggingface", "step": 12}}
    body = model_card(replace(saved, state=state), CHARACTERS, Told(), "5.20")
    assert "12 steps before it was converted (from huggingface), and after that 2 steps of 1,000, 84 tokens" in body


def test_a_line_end_is_named(tmp_path: Path) -> None:
    _, body = card(tmp_path, "all-attn", ByteTokenizer(), Told())
    assert "byte, a line end is a token, eos_token" in body
