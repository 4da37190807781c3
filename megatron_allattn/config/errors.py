"""A user's mistake, told in one line.

The line says which flag or file, its value, the rule it breaks and the way out. The programs print it as
`error: …` and exit with 2. Faults of our own are assertions or other exceptions, never a `UsageError`.
"""

import errno

_LONGEST_VALUE = 120
_NO_PATHS = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)
_DAMAGE = (errno.EIO, errno.ENOENT)


class UsageError(ValueError):
    """A mistake of the user; the message is one printable line that names flag or file, value, rule and way out."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def usage_error(what: str, value: object, rule: str, fix: str) -> UsageError:
    """The error `WHAT VALUE: RULE; FIX` .

    Args:
        what: the flag (`--num-layers`), file or configuration key.
        value: what the user gave; an empty string shows as `''`, a very long value is cut in the middle.
        rule: which rule the value breaks.
        fix: what to do instead.
    """
    shown = str(value) or "''"
    if len(shown) > _LONGEST_VALUE:
        half = _LONGEST_VALUE // 2
        shown = f"{shown[:half]}…{shown[-half:]}"  # a path's last parts tell as much as its first
    return UsageError(f"{what} {shown}: {rule}; {fix}")


class Unreadable(UsageError):
    """A file or folder cannot be looked at: nothing is known of it, so that it is not taken for damaged or missing."""


def unreadable(what: str, path: object, error: OSError, fix: str) -> UsageError:
    """The error of a file that cannot be read: Unreadable, unless it is gone or its disk cannot give it any more."""
    told = usage_error(what, path, f"cannot be read ({error.strerror})", fix)
    return told if error.errno in _DAMAGE else Unreadable(str(told))


def as_mistake(error: BaseException) -> BaseException:
    """What the operating system says of a path that this user may not use, or that there cannot be, as a mistake of the
    user's; any other error as it is."""
    if isinstance(error, OSError) and error.errno in _NO_PATHS and error.filename is not None:
        fix = "check that path, or name another"
        told = usage_error("path", error.filename, error.strerror or "cannot be used", fix)
        return Unreadable(str(told)).with_traceback(error.__traceback__)
    return error


def flag(field: str) -> str:
    """The command line's spelling of a configuration field: `num_layers` → `--num-layers`."""
    return "--" + field.replace("_", "-")


def one_line(text: str) -> str:
    """The text with line breaks as spaces and other characters a terminal could act on as escapes."""
    return printable(" ".join(text.split()))


def printable(text: str) -> str:
    """The text with every character that is not to be printed as an escape, line breaks too."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
