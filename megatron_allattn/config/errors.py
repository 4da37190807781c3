"""A user's mistake, told in one line.

The line says which flag or file, its value, the rule it breaks and the way out. The programs print it as
`error: …` and exit with 2. Faults of our own are assertions or other exceptions, never a `UsageError`.
"""

_LONGEST_VALUE = 120


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


def flag(field: str) -> str:
    """The command line's spelling of a configuration field: `num_layers` → `--num-layers`."""
    return "--" + field.replace("_", "-")


def one_line(text: str) -> str:
    """The text with line breaks as spaces and other characters a terminal could act on as escapes."""
    joined = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in joined)
