"""SLURM's lists written out, and what is no such list."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from megatron_allattn.config.errors import UsageError
from megatron_allattn.parallel.nodelist import MOST, expand_counts, expand_nodes

LISTS = {
    "n1": ["n1"],
    "n1,n2.x": ["n1", "n2.x"],
    "gpu[007-009,12]-x,login1": ["gpu007-x", "gpu008-x", "gpu009-x", "gpu12-x", "login1"],
    "r[1-2]n[09-10]": ["r1n09", "r1n10", "r2n09", "r2n10"],
    "n[98-101]": ["n98", "n99", "n100", "n101"],
}


@pytest.mark.parametrize(("text", "nodes"), LISTS.items())
def test_lists(text: str, nodes: list[str]) -> None:
    assert expand_nodes(text) == nodes


@pytest.mark.parametrize("text", [text for text in LISTS if "]-" not in text])  # 22.05 knows no end after the last ]
def test_lists_as_slurm_reads_them(tmp_path: Path, text: str) -> None:
    if shutil.which("scontrol") is None:
        pytest.skip("no SLURM here (make system-deps)")
    configuration = tmp_path / "slurm.conf"
    configuration.write_text("ClusterName=c\nSlurmctldHost=h\nNodeName=h\nPartitionName=p Nodes=h\n")
    done = subprocess.run(
        ["scontrol", "show", "hostnames", text],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"SLURM_CONF": str(configuration)},
    )
    assert done.stdout.split() == expand_nodes(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a list of hosts"),
        (",n1", "not a list of hosts"),
        ("n1,,n2", "not a list of hosts"),
        ("n[1-", "not a list of hosts"),
        ("n]1[", "not a list of hosts"),
        ("n[a-b]", "not a list of hosts"),
        ("n[1;touch x]", "not a list of hosts"),
        ("$(id)", "not a list of hosts"),
        ("-oProxyCommand=x", "not a list of hosts"),
        ("n1 n2", "not a list of hosts"),
        ("n[3-1]", "3-1 is no range"),
        (f"n[0-{MOST}]", f"has more than {MOST} nodes"),
        ("n[0-999]m[0-999]", f"has more than {MOST} nodes"),
        ("n1,n[1-2]", "n1 is there twice"),
    ],
)
def test_what_is_no_list(text: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        expand_nodes(text, "--nodes")
    assert words in str(error.value) and str(error.value).startswith("--nodes ")


def test_counts() -> None:
    assert expand_counts("8(x3),4", "X") == [8, 8, 8, 4]
    for text in ("", "x", "2(3)", "2,,3", "2(x99999999)"):
        with pytest.raises(UsageError, match=r"^X .*: not a list of counts"):
            expand_counts(text, "X")
