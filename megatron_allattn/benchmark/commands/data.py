"""`tools/benchmark.py data`: token files to batches, and text to token files."""

import argparse
import tempfile
from pathlib import Path

import torch

from megatron_allattn.benchmark import report
from megatron_allattn.benchmark.data import measure_data
from megatron_allattn.benchmark.machine import describe, use_threads
from megatron_allattn.data.corpora import files_corpus, standard_library


def run(options: argparse.Namespace) -> int:
    use_threads(1)
    corpus = files_corpus(options.input) if options.input else standard_library()
    with tempfile.TemporaryDirectory(prefix="benchmark_data_") as folder:
        result = measure_data(
            Path(folder),
            corpus,
            megabytes=options.megabytes,
            num_streams=options.global_batch_size,
            seq_length=options.seq_length,
            runs=options.runs,
            warmup=options.warmup,
        )
    machine = describe(torch.device("cpu"), 1)
    text = sum(document.num_bytes for document in corpus.documents) / 1e6
    print(*report.machine_lines(machine, None), sep="\n")
    print(f"text: {corpus.description}, {text:.1f} MB; token files of {options.megabytes} MB")
    header = ("one core", "MB/s", "lowest", "highest")
    rows = [
        (name, *(f"{one[key]:.{2 if one[key] < 10 else 1}f}" for key in ("median", "lowest", "highest")))
        for name, one in result["mb_per_second"].items()
    ]
    print(report.table(header, rows))
    settings = {
        "text": corpus.description,
        "text_mb": text,
        "megabytes": options.megabytes,
        "global_batch_size": options.global_batch_size,
        "seq_length": options.seq_length,
        "runs": options.runs,
        "warmup": options.warmup,
    }
    report.write_json(options.json, "data", {**result, "machine": machine, "settings": settings})
    return 0
