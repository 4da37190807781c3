"""Span profiles: how far every head of every layer looks back, as a small JSON file or from a run's checkpoint.

    {"format": "megatron-allattn-spans", "version": 1, "about": "…", "ramp": 32, "tokens": [[H numbers], … layers]}

`tokens` is what a run logs and the paper's code too: min(L, z·L + R) for a ramp of R = `ramp` tokens, so R is a head
that has learned nothing yet. A profile serves a model of any shape: layers and heads of another number are taken at
equal relative places, and a reach beyond the model's maximum ends there. Both are told in `notes`, since the mean
changes with them.
"""

import json
import math
from dataclasses import dataclass
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_allattn.config.checks import check_regular
from megatron_allattn.config.errors import UsageError, usage_error

FORMAT, VERSION = "megatron-allattn-spans", 1
FLAG = "--span-profile"
_FIX = "see docs/performance.md for the format"


@dataclass(frozen=True)
class SpanProfile:
    """tokens: min(L, z·L + ramp) of every head, [layers][heads]; notes: what was changed to fit a model."""

    name: str
    about: str
    ramp: int
    tokens: tuple[tuple[float, ...], ...]
    notes: tuple[str, ...] = ()

    @property
    def mean(self) -> float:
        """Tokens that a head looks back on average, ramp included."""
        heads = list(chain.from_iterable(self.tokens))
        return math.fsum(heads) / len(heads)

    @property
    def longest(self) -> float:
        """Tokens of the head that looks back furthest."""
        return max(chain.from_iterable(self.tokens))

    def fit(self, num_layers: int, num_heads: int, max_span: int) -> "SpanProfile":
        """The profile of a model with that many layers and context heads and that maximum span L."""
        rows = [self.tokens[i] for i in _places(len(self.tokens), num_layers)]
        tokens = [[row[i] for i in _places(len(row), num_heads)] for row in rows]
        notes = list(self.notes)
        if (len(self.tokens), len(self.tokens[0])) != (num_layers, num_heads):
            shape = f"{len(self.tokens)} × {len(self.tokens[0])}"
            notes.append(f"{self.name} has {shape} heads: taken at equal places for {num_layers} × {num_heads}")
        if over := sum(value > max_span for row in tokens for value in row):
            notes.append(f"{over} heads of {self.name} look further than the maximum span {max_span}: cut to it")
        cut = tuple(tuple(min(value, max_span) for value in row) for row in tokens)
        return SpanProfile(self.name, self.about, self.ramp, cut, tuple(notes))

    def z(self, max_span: int) -> tuple[tuple[float, ...], ...]:
        """The learned number z of every head: (tokens − ramp) / L; 1 where the whole maximum L is seen."""
        return tuple(
            tuple(1.0 if tokens >= max_span else (tokens - self.ramp) / max_span for tokens in row)
            for row in self.tokens
        )

    def to_json(self) -> str:
        """The text of a profile file."""
        rows = ",\n".join(f"    {json.dumps(row)}" for row in self.tokens)
        head = {"format": FORMAT, "version": VERSION, "about": self.about, "ramp": self.ramp}
        fields = "\n".join(f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items())
        return f'{{\n{fields}\n  "tokens": [\n{rows}\n  ]\n}}\n'


def _places(available: int, wanted: int) -> list[int]:
    """Which of `available` things stand for `wanted` ones: those at the same relative place."""
    return [(2 * i + 1) * available // (2 * wanted) for i in range(wanted)]


def packaged() -> list[str]:
    """Names of the profiles that come with the package."""
    folder = resources.files(__package__) / "profiles"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def read_profile(given: str) -> SpanProfile:
    """The profile that --span-profile names: one of `packaged()`, a JSON file, or a run folder (its newest step).

    Raises UsageError: there is no such thing, or it is not a profile.
    """
    if given in packaged():
        entry = resources.files(__package__) / "profiles" / f"{given}.json"
        return parse_profile(given, given, entry.read_text(encoding="utf-8"))
    path = Path(given)
    if path.is_dir():
        return _of_run(path)
    known = f"give one of {', '.join(packaged())}, a JSON file or a run folder"
    check_regular(FLAG, path, known)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise usage_error(FLAG, given, f"cannot be read ({reason})", known) from None
    return parse_profile(given, path.stem, text)


def parse_profile(source: str, name: str, text: str) -> SpanProfile:
    """A profile from the text of a file. Raises UsageError: it breaks the format."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise usage_error(FLAG, source, f"is not JSON ({error})", _FIX) from None
    if not isinstance(values, dict) or (values.get("format"), values.get("version")) != (FORMAT, VERSION):
        raise usage_error(FLAG, source, f"is no object of format {FORMAT}, version {VERSION}", _FIX)
    if unknown := sorted(values.keys() - {"format", "version", "about", "ramp", "tokens"}):
        raise usage_error(FLAG, source, f"has unknown keys {', '.join(unknown)}", _FIX)
    about, ramp, rows = values.get("about"), values.get("ramp"), values.get("tokens")
    if not isinstance(about, str):
        raise usage_error(FLAG, source, "about is not text", _FIX)
    if type(ramp) is not int or ramp < 1:
        raise usage_error(FLAG, source, "ramp is not a whole number above 0", _FIX)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and row for row in rows):
        raise usage_error(FLAG, source, "tokens is not a list of layers, each a list of heads", _FIX)
    if len({len(row) for row in rows}) > 1:
        raise usage_error(FLAG, source, "its layers differ in their number of heads", _FIX)
    for layer, row in enumerate(rows):
        for value in row:
            if not _is_number(value) or value < ramp:
                raise usage_error(FLAG, source, f"layer {layer} has {value!r}, not a number from ramp {ramp} up", _FIX)
    return SpanProfile(name, about, ramp, tuple(map(tuple, rows)))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _of_run(run_folder: Path) -> SpanProfile:
    """The spans of a run's newest complete checkpoint."""
    # Its readers need safetensors, which a machine that only measures kernels need not have.
    from megatron_allattn.checkpoint import folder, save  # noqa: PLC0415
    from megatron_allattn.checkpoint.tensors import TensorReader  # noqa: PLC0415

    try:
        step_folder, notes = folder.find_latest(run_folder)
        state = save.read_state(step_folder)
        model = save.read_config(step_folder, state).model
        weights = TensorReader(step_folder, "weights")
    except UsageError as error:
        raise UsageError(f"{FLAG} {error}") from error
    if not model.adaptive_span:
        raise usage_error(FLAG, run_folder, "its model has a fixed span", "leave the flag out, or name another run")
    length, ramp = model.max_attention_span, model.span_ramp
    z = [weights.read(f"layers.{layer}.span").flatten().tolist() for layer in range(model.num_layers)]
    tokens = tuple(tuple(min(length, value * length + ramp) for value in layer) for layer in z)
    about = f"step {state['step']} of a run at a maximum of {length}"
    return SpanProfile(run_folder.name, about, ramp, tokens, tuple(notes))
