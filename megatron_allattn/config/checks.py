"""What the sections of the configuration check about their own fields: the declared type, and a range.

The annotation of a dataclass field is the rule for its type, whether the value comes from the command line, from a
recipe or from a JSON file. Two conversions lose nothing and are made: an integer where a number is asked for, and a
string where a path is.
"""

import dataclasses
import functools
import math
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron_allattn.config.errors import flag, usage_error

LARGEST = 2**31 - 1
"""The largest size, count or number of steps that is accepted (they end up in 32-bit indices)."""

_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path"}


def check_regular(what: str, path: Path, fix: str) -> None:
    """UsageError for what is there and is no regular file: a pipe would be waited for without end."""
    if path.exists() and not path.is_file():
        raise usage_error(what, path, "is not a regular file", fix)


def check_text(word: str) -> None:
    """UsageError for an argument of bytes that make no characters, which no file of ours could name."""
    try:
        word.encode()
    except UnicodeEncodeError:
        raise usage_error("argument", word, "is not UTF-8", "rename what it names") from None


def check_output(flag: str, path: Path | None) -> None:
    """UsageError for a file that cannot be written: told before the work whose result it is to hold."""
    if path is None:
        return
    fix, new = "name a file in a folder that exists and takes files", not path.exists()
    if path.is_dir() or not path.absolute().parent.is_dir():
        rule = "is a folder" if path.is_dir() else f"the folder {path.parent} does not exist"
        raise usage_error(flag, path, rule, fix)
    try:
        path.open("a").close()
    except OSError as error:
        raise usage_error(flag, path, f"cannot be written ({error.strerror})", fix) from None
    if new:
        path.unlink()


class _Refused:
    """The result for a value that does not fit a type."""


@functools.cache
def field_types(section: type) -> dict[str, tuple[Any, ...]]:
    """Every field of a section with the types it accepts: `int | None` → `(int, NoneType)`."""
    hints = get_type_hints(section)
    return {
        field.name: get_args(hints[field.name])
        if get_origin(hints[field.name]) in (Union, UnionType)
        else (hints[field.name],)
        for field in dataclasses.fields(section)
    }


def describe_type(section: type, name: str) -> str:
    """What the field accepts, in words: `an integer`, `one of none, shared`."""
    parts = []
    for accepted in field_types(section)[name]:
        if get_origin(accepted) is Literal:
            parts.append("one of " + ", ".join(get_args(accepted)))
        elif accepted is not NoneType:
            parts.append(_NAMES.get(accepted, str(accepted)))
    return " or ".join(parts)


def conform_types(section: object) -> None:
    """Checks every field of a dataclass instance against its annotation, converting int → float and str → Path.

    Raises:
        UsageError: a value does not fit the type its field declares.
    """
    kind: type = type(section)
    for name, accepted in field_types(kind).items():
        value = getattr(section, name)
        fitting = next((v for v in (_conform(value, a) for a in accepted) if not isinstance(v, _Refused)), _Refused())
        if isinstance(fitting, _Refused):
            raise usage_error(flag(name), value, f"must be {describe_type(kind, name)}", default_of(kind, name))
        if fitting is not value:
            object.__setattr__(section, name, fitting)


def check_range(
    section: Any,
    name: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> None:
    """Checks a number of a section (None, where allowed, passes) against its bounds; NaN and infinity never pass.

    Raises:
        UsageError: outside the bounds or not finite.
    """
    value = getattr(section, name)
    if value is None:
        return
    if not math.isfinite(value):
        raise usage_error(flag(name), value, "must be a finite number", default_of(type(section), name))
    bounds = (
        ("at least", at_least, at_least is None or value >= at_least),
        ("above", above, above is None or value > above),
        ("at most", at_most, at_most is None or value <= at_most),
        ("below", below, below is None or value < below),
    )
    if not all(holds for _, _, holds in bounds):
        rule = " and ".join(f"{words} {bound}" for words, bound, _ in bounds if bound is not None)
        raise usage_error(flag(name), value, f"must be {rule}", default_of(type(section), name))


def default_of(section: type, name: str) -> str:
    """The way out of a bad value: what the flag is when left out."""
    default = next(field.default for field in dataclasses.fields(section) if field.name == name)
    return "correct it or leave the flag out" if default is None else f"the default is {default}"


def _conform(value: object, accepted: Any) -> object:
    """The value as the accepted type, or `_Refused`."""
    if get_origin(accepted) is Literal:
        return value if isinstance(value, str) and value in get_args(accepted) else _Refused()
    if accepted is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return _Refused()
    if accepted is Path and isinstance(value, str) and value:
        return Path(value)
    if accepted is Path:
        return value if isinstance(value, Path) else _Refused()
    return value if type(value) is accepted else _Refused()
