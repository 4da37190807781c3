"""A cluster of three nodes for all tests of a file, and a folder and a corpus for each of them."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import corpus
from tests.support.jobs import PATIENCE, Scene
from tests.support.slurm import Cluster, Site, cluster, why_none


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[Cluster]:
    if (why := why_none()) is not None:
        pytest.skip(why)
    with cluster(Site(nodes=3, gpus=2, kill_wait=30)) as started:
        yield started


@pytest.fixture(scope="module")
def data() -> Iterator[Path]:
    """A corpus in a folder of its own, which a test can take from a node."""
    with tempfile.TemporaryDirectory() as folder:
        yield corpus(Path(folder))


@pytest.fixture
def scene(three_nodes: Cluster, data: Path, tmp_path: Path) -> Scene:
    three_nodes.until(lambda: three_nodes.idle() == three_nodes.nodes, PATIENCE, lambda: "nodes are not idle")
    return Scene(three_nodes, tmp_path, data)
