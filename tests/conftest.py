"""What every test shares: one thread per process, the worker pools, and the folder of shared reference material."""

import os
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; child processes inherit it
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch

from tests.support.pool import ROOT, WorkerPools

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pools() -> Iterator[WorkerPools]:
    """Persistent workers: `pools(world_size).run(function, *args)` gives the results by rank."""
    workers = WorkerPools()
    yield workers
    workers.end()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder `shared` beside the repository; tests that need it are skipped where there is none."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"no folder {folder} with reference material")
    return folder
