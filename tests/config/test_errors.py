"""What the operating system says of paths, told as a user's mistake or as a fault."""

import errno
import os
from pathlib import Path

import pytest

from megatron_allattn.config.errors import Unreadable, UsageError, as_mistake, unreadable


def raised(number: int, path: str | None = "/x/run") -> OSError:
    return OSError(number, os.strerror(number), path)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR])
def test_a_path_that_cannot_be_used_is_a_mistake(number: int) -> None:
    found = as_mistake(raised(number))
    assert isinstance(found, UsageError)
    assert str(found) == f"path /x/run: {os.strerror(number)}; check that path, or name another"


@pytest.mark.parametrize(
    "error",
    [raised(errno.EIO), raised(errno.ESTALE), raised(errno.ENOSPC), raised(errno.EACCES, None), ValueError("x")],
)
def test_a_fault_stays_what_it_is(error: Exception) -> None:
    assert as_mistake(error) is error


@pytest.mark.parametrize(("number", "known"), [(errno.EIO, True), (errno.ENOENT, True), (errno.EACCES, False)])
def test_of_what_cannot_be_looked_at_nothing_is_known(number: int, known: bool) -> None:
    found = unreadable("file", Path("/x/state.json"), raised(number), "move it away")
    assert str(found) == f"file /x/state.json: cannot be read ({os.strerror(number)}); move it away"
    assert isinstance(found, Unreadable) is not known
