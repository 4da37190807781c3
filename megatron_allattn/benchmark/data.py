"""From token files to batches, and from text to token files, on one core: MB (10⁶ bytes) per second.

Batches: what a training run's `TokenStreams` hands over, every token once as an input; counted are bytes of the token
file, which is in the page cache. Preparation: all of `tools/prepare_data.py`, checks, counts and hashes included;
counted are bytes of text.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_allattn.benchmark.timing import alternate, seconds, summarize
from megatron_allattn.data.corpora import Corpus
from megatron_allattn.data.indexed import IndexedReader, IndexedWriter
from megatron_allattn.data.prepare import Preparation, prepare
from megatron_allattn.data.streams import TokenStreams
from megatron_allattn.data.words import WordLearner

CPU = torch.device("cpu")
MAKERS: dict[str, Callable[[], Any]] = {"byte": lambda: "byte", "word": WordLearner}
TOKEN_TYPES = {"uint8": 256, "uint16": 50_000, "int32": 267_735}  # with how many ids


class Batches:
    """Call it for the MB/s of reading every token of a file once, in blocks [streams, M]."""

    def __init__(self, prefix: Path, dtype: str, num_tokens: int, num_streams: int, seq_length: int) -> None:
        with IndexedWriter(prefix, dtype) as writer:
            generator = np.random.default_rng(0)
            for start in range(0, num_tokens, 2**20):
                size = min(2**20, num_tokens - start)
                writer.append(generator.integers(TOKEN_TYPES[dtype], size=size, dtype=dtype))
            writer.end_document()
        self.streams = TokenStreams(IndexedReader(prefix).tokens, num_streams, seq_length, seed=1)
        self.blocks = self.streams.stream_length // seq_length
        self.bytes = self.blocks * num_streams * seq_length * np.dtype(dtype).itemsize

    def _read(self) -> None:
        everyone = range(self.streams.num_streams)
        for _ in range(self.blocks):
            self.streams.next_block(everyone)

    def __call__(self) -> float:
        return self.bytes / 1e6 / seconds(self._read, CPU)


def preparation(corpus: Corpus, prefix: Path, tokenizer: str) -> Callable[[], float]:
    """The MB/s of preparing a corpus anew."""
    whole = "1,0,0"  # any text has lines enough for one split
    job = Preparation(corpus=corpus, prefix=prefix, tokenizer=MAKERS[tokenizer](), split=whole, existing="overwrite")
    return lambda: job.num_bytes() / 1e6 / seconds(partial(prepare, job), CPU)


def measure_data(
    folder: Path, corpus: Corpus, *, megabytes: int, num_streams: int, seq_length: int, runs: int, warmup: int
) -> dict[str, Any]:
    """MB/s of every case. Files go to `folder`; token files are `megabytes` large."""
    cases: dict[str, Callable[[], float]] = {
        f"batches, {dtype}": Batches(
            folder / dtype, dtype, megabytes * 1_000_000 // np.dtype(dtype).itemsize, num_streams, seq_length
        )
        for dtype in TOKEN_TYPES
    }
    cases |= {f"prepare, {name}": preparation(corpus, folder / name, name) for name in MAKERS}
    found = alternate(cases, runs, warmup)
    return {"mb_per_second": {name: summarize(values).to_dict() for name, values in found.items()}}
