"""Cached decoding and data: what is read, and the numbers made of it."""

from pathlib import Path

import numpy as np
import pytest

from megatron_allattn.benchmark.data import Batches, measure_data, preparation
from megatron_allattn.benchmark.generate import GenerateCase, generation_result, measure_generation
from megatron_allattn.data.corpora import files_corpus
from megatron_allattn.data.indexed import IndexedReader
from megatron_allattn.data.manifest import read_manifest
from tests.benchmark.test_step import MODEL, Z

CASE = GenerateCase(MODEL, 50, 2, Z, "cpu", "float32")


def test_numbers_of_decoding_by_hand() -> None:
    found = {"10": [1.0, 2.0, 3.0], "99": [2.5, 2.0, 1.0], "recompute": [50.0, 30.0, 10.0]}
    result = generation_result(found, CASE, window=128)
    assert result["seconds_per_token"]["10"]["median"] == result["seconds_per_token"]["99"]["median"] == 2.0
    assert (result["tokens_per_second"], result["flatness"]) == (1.0, 0.0)  # two streams
    assert result["times_faster"] == 15.0  # of 20, 15 and 10
    assert (result["recompute_tokens"], result["recompute_seconds"]["median"]) == (128, 30.0)


def test_decoding_end_to_end() -> None:
    result = measure_generation(CASE, [5, 700], tokens=3, runs=2, warmup=1)
    assert list(result["seconds_per_token"]) == ["5", "700"]
    assert result["recompute_tokens"] == 128  # the longest head's window
    assert result["times_faster"] > 0


def test_batches_read_every_token_once(tmp_path: Path) -> None:
    batches = Batches(tmp_path / "tokens", "uint16", num_tokens=2000, num_streams=4, seq_length=32)
    assert (batches.blocks, batches.bytes) == (15, 15 * 4 * 32 * 2)  # 500 tokens a stream
    seen: list[np.ndarray] = []
    original = batches.streams.next_block
    batches.streams.next_block = lambda wanted: (seen.append(original(wanted).inputs), None)[1]  # type: ignore[assignment]
    assert batches() > 0
    tokens = IndexedReader(tmp_path / "tokens").tokens
    streams = tokens.reshape(4, 500)
    assert np.array_equal(np.concatenate(seen, axis=1), streams[:, : 15 * 32])
    assert tokens.max() > 40_000


@pytest.mark.parametrize("tokenizer", ["byte", "word"])
def test_preparation_counts_the_bytes_of_the_text(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    text.write_text("one two two three\n" * 500)
    monkeypatch.setattr("megatron_allattn.benchmark.data.seconds", lambda action, device: (action(), 0.001)[1])
    run = preparation(files_corpus([text]), tmp_path / "out", tokenizer)
    assert run() == run() == pytest.approx(9.0)  # 9,000 bytes in a millisecond, twice to the same place
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None and manifest.tokenizer.name == tokenizer and manifest.bytes == 9000


def test_all_of_it(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("one two two three\n" * 500)
    corpus = files_corpus([text])
    result = measure_data(tmp_path, corpus, megabytes=1, num_streams=4, seq_length=64, runs=1, warmup=0)
    names = ["batches, uint8", "batches, uint16", "batches, int32", "prepare, byte", "prepare, word"]
    assert list(result["mb_per_second"]) == names
    assert all(one["median"] > 0 for one in result["mb_per_second"].values())
