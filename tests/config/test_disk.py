"""Hashes of files, and folders that are brought to the disk."""

import errno
import os
from pathlib import Path

import pytest

from megatron_allattn.config.disk import sha256_of, sync_file, sync_folder


def test_sha256_of_a_file(tmp_path: Path) -> None:
    """Of `abc`, by FIPS 180-4."""
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256_of(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_syncing_ends_with_the_descriptor_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on file systems that have no fsync for folders; any other failure is raised."""
    before = len(os.listdir("/proc/self/fd"))
    (tmp_path / "a").touch()
    sync_file(tmp_path / "a")
    sync_folder(tmp_path)
    code = errno.EINVAL

    def failing(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", failing)
    sync_folder(tmp_path)
    code = errno.EIO
    for sync in (sync_folder, sync_file):
        with pytest.raises(OSError, match="Input/output error"):
            sync(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
