"""Whether a folder takes files as a run writes them: write, fsync, rename. Without torch.

Here by one node alone; shared.py does it with all ranks, who look at each other's files.
"""

import os
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path

from megatron_allattn.cluster.nodes.checks import Check
from megatron_allattn.config.disk import sync_folder

NAME = "shared folder"
PREFIX = ".preflight-"
CONTENT_BYTES = 2**16


def storage_check(node: str, folder: Path) -> Check:
    """Write a file there, flush it, rename it over another, read it back, and remove it again."""
    own = folder / f"{PREFIX}{uuid.uuid4().hex}"
    begin, asked = time.monotonic(), f"{folder}: write, fsync and rename"
    try:
        put(own, os.urandom(CONTENT_BYTES))
        content = os.urandom(CONTENT_BYTES)
        put(own, content)
        same = own.read_bytes() == content
        free = shutil.disk_usage(folder).free
    except OSError as error:
        found = f"{error.strerror} ({error.filename or folder})"
        way = "mount it there for writing, or name another folder with --shared"
        return Check(name=NAME, node=node, status="fault", found=found, asked=asked, way_out=way)
    finally:
        remove(own)
    took = 1e3 * (time.monotonic() - begin)
    found = f"works ({took:.0f} ms, {free / 2**30:.1f} GiB free)" if same else "what was read is not what was written"
    way = "do not write there: its file system, or what it is on, is broken"
    return Check(name=NAME, node=node, status="ok" if same else "fault", found=found, asked=asked, way_out=way)


def put(path: Path, content: bytes) -> None:
    """Write under a temporary name, flush, rename over `path`, flush the rename: as checkpoints are. Raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """And its temporary name, whichever are there."""
    for one in (path, path.with_name(f"{path.name}.tmp")):
        with suppress(OSError):
            one.unlink(missing_ok=True)
