"""What every test shares: one thread per process, the worker pools, and the folder of shared reference material."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; child processes inherit it
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch

from tests.support.pool import WorkerPools
from tests.support.template import ROOT, Template

torch.set_num_threads(1)

# A shell starts what is to run in its background without Ctrl-C; programs of tests are sent it, and would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONG = (  # the longest files, first: begun last they would keep one process busy while the other is idle
    "cluster/jobs/test_two_nodes.py",
    "cli/test_launchers.py",
    "kernels/test_triton_attention.py",
    "engine/test_engines.py",
    "cluster/jobs/test_batch_script.py",
    "training/test_placement.py",
    "cli/test_output.py",
    "cli/test_bad_input.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first."""
    items.sort(key=lambda item: min((i for i, name in enumerate(LONG) if item.path.match(name)), default=len(LONG)))


@pytest.fixture(scope="session")
def template() -> Iterator[Template]:
    """What forks workers, and programs for tests that start many."""
    interpreter = Template()
    yield interpreter
    interpreter.end()


@pytest.fixture(scope="session")
def pools(template: Template) -> Iterator[WorkerPools]:
    """Persistent workers: `pools(world_size).run(function, *args)` gives the results by rank."""
    workers = WorkerPools(template)
    yield workers
    workers.end()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder `shared` beside the repository; tests that need it are skipped where there is none."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"no folder {folder} with reference material")
    return folder
