"""What a report says in words and numbers: the table on top, what has happened, why a picture is missing."""

from collections.abc import Callable
from datetime import UTC, datetime

import numpy as np

from megatron_allattn.checkpoint.run_folder import METRICS, OBSERVATIONS, End
from megatron_allattn.config.model import ModelConfig
from megatron_allattn.config.parameters import Parameters, count_parameters
from megatron_allattn.config.recipes import in_words
from megatron_allattn.report.metrics import MOST_EVENTS, Curve, Event
from megatron_allattn.report.run import Run
from megatron_allattn.report.style import in_short

OUTCOMES: dict[End, str] = {
    "done": "done",
    "stopped": "stopped on request",
    "guard": "stopped by its guard",
    "failed": "failed",
}
UNKNOWN = "not known"


def state_of(run: Run) -> str:
    """How it stands, in a word or two."""
    return OUTCOMES[run.outcome.how] if run.outcome else "no outcome yet"


def best(run: Run) -> str:
    return _value(run, run.metrics.valid, lambda curve: curve.lowest)


def last(run: Run, curve: Curve) -> str:
    return _value(run, curve, lambda curve: curve.last)


def _value(run: Run, curve: Curve, chosen: Callable[[Curve], tuple[int, float] | None]) -> str:
    found = chosen(curve)
    return "none" if found is None else f"{number(run, found[1])} at step {found[0]:,}"


def number(run: Run, loss: float) -> str:
    """A loss in the run's unit: 1.2340 bpc."""
    value = float(run.in_unit(loss))
    return f"{value:.4f} {run.metrics.unit}" if value < 1e4 else f"{value:.4g} {run.metrics.unit}"


def steps(run: Run) -> str:
    done, planned = run.metrics.last_step, run.config.training.train_iters
    return f"{done:,} of {planned:,}" if done != planned else f"{done:,}"


def tokens(run: Run) -> str:
    found = run.metrics.train["tokens"].last
    return in_short(found[1]) if found else UNKNOWN


def parameters(run: Run) -> str:
    count, vocabulary = _parameters(run)
    if count is None:
        return "known once there is a checkpoint"
    about = f" with the recipe's vocabulary of {vocabulary:,}" if vocabulary else ""
    share = f", {100 * count.persistent / count.total:.0f} % in persistent vectors" if count.persistent else ""
    return f"{count.total:,}{about}{share}"


def parameters_in_short(run: Run) -> str:
    count, _ = _parameters(run)
    return UNKNOWN if count is None else in_words(count.total)


def _parameters(run: Run) -> tuple[Parameters | None, int | None]:
    """How many there are, and the recipe's vocabulary where they are counted with that, since no checkpoint tells: data
    may bring another."""
    if run.parameters is not None or run.recipe is None:
        return run.parameters, None
    return count_parameters(run.config.model, run.recipe.vocab_size), run.recipe.vocab_size


def model_line(model: ModelConfig) -> str:
    """The network in a line."""
    width = f", feed-forward {model.feed_forward_size}" if model.feed_forward_size else ""
    vectors = f", N = {model.persistent_memory_size}" if model.persistent_memory_size else ""
    span = "adaptive span up to" if model.adaptive_span else "span"
    return (
        f"{model.variant}: {model.num_layers} layers × {model.num_attention_heads} heads, d = {model.hidden_size}"
        f"{vectors}{width}, {span} {model.max_attention_span:,}"
    )


def speed(run: Run) -> str:
    rates = run.metrics.train["tokens_per_second"].known.values
    return f"{in_short(float(np.median(rates)))} tokens/s" if len(rates) else UNKNOWN


def peak_memory(run: Run) -> str:
    memory = run.observations.memory
    if not memory:
        return "not measured"
    most = max(memory, key=lambda one: one.peak_bytes)
    return f"{most.peak_bytes / 2**30:.2f} GiB ({'GPU' if most.device == 'cuda' else most.device})"


def duration(seconds: float | None) -> str:
    """93784 → 1 d 2 h 3 min."""
    if seconds is None:
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    parts = ((minutes // 1440, "d"), (minutes // 60 % 24, "h"), (minutes % 60, "min"))
    return " ".join(f"{value} {unit}" for value, unit in parts if value)


def skipped(run: Run) -> int:
    """Updates that were left out: as training counts them, or as records tell."""
    counted = run.metrics.train["skipped"].last
    return max(len(run.metrics.marks["skip"]), int(counted[1]) if counted else 0)


def layouts(run: Run) -> list[str]:
    """Each layout that was used, with the step after which it began."""
    starts = [start for start in run.observations.starts if start.layout]
    told = [f"{starts[0].layout} (from step {starts[0].step:,})"] if starts else []
    return told + [f"{now} (from step {step:,})" for step, _, now in run.observations.layout_changes]


def headline(run: Run) -> list[tuple[str, str]]:
    """The few numbers that are looked for first: (value, what it is)."""
    found = []
    unit = run.metrics.unit
    for words, point in (
        ("best validation", run.metrics.valid.lowest),
        ("test", run.metrics.test.last),
        ("last training loss", run.metrics.loss.last),
    ):
        if point is not None:
            value = float(run.in_unit(point[1]))
            found.append((f"{value:.4f}" if value < 1e4 else f"{value:.4g}", f"{words}, {unit}"))
    found = found[:2]
    found.append((steps(run).split(" of ")[0], f"steps of {run.config.training.train_iters:,}"))
    found.append((tokens(run), "tokens"))
    found.append((speed(run).removesuffix(" tokens/s"), "tokens per second, median"))
    return found


def table(run: Run) -> list[tuple[str, list[str]]]:
    """The table on top: a name and its lines."""
    papers = [f"{split} {value:g} {run.metrics.unit}" for split, value in run.papers.items()]
    outcome, observations = run.outcome, run.observations
    ended = state_of(run) + (f": {outcome.reason}" if outcome else " (it runs, or was killed without a word)")
    rows = [
        ("recipe", [run.config.recipe or "none"]),
        ("model", [model_line(run.config.model)]),
        ("parameters", [parameters(run)]),
        ("data", [run.config.data.data_path or "Python's own sources"]),
        ("best validation", [best(run)]),
        ("last validation", [last(run, run.metrics.valid)]),
        ("test", [last(run, run.metrics.test)]),
        ("the paper", [", ".join(papers) + f" on {run.recipe.prepare}"] if papers and run.recipe else []),
        ("outcome", [ended]),
        ("steps, tokens", [f"{steps(run)}, {tokens(run)} tokens"]),
        ("layout", layouts(run) or ["not recorded"]),
        ("first start", [_date(observations.starts[0].seconds)] if observations.starts else []),
        ("time in steps", [duration(run.seconds_in_steps)]),
        ("throughput", [f"{speed(run)}, median"] if speed(run) != UNKNOWN else []),
        ("peak memory", [f"{peak_memory(run)} on the rank that needs most"] if observations.memory else []),
        ("restarts", [f"{len(observations.restarts):,}" if observations.starts else "not recorded"]),
        ("updates left out", [f"{skipped(run):,}"]),
        ("loss spikes", [f"{len(run.metrics.marks['spike']):,}"]),
    ]
    return [(name, lines) for name, lines in rows if lines]


def _date(seconds: float | None) -> str:
    if seconds is None:
        return UNKNOWN
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
    except (OverflowError, OSError, ValueError):  # no moment of any calendar
        return UNKNOWN


def happened(run: Run) -> tuple[list[Event], int]:
    """What has happened, by step, and how many events more there were than are told."""
    seen = run.observations
    starts = [Event(step=one.step, kind="restart", told=one.layout or "a further life") for one in seen.restarts]
    changes = [Event(step=s, kind="other layout", told=f"{a} → {b}") for s, a, b in seen.layout_changes]
    changed = {event.step for event in changes}
    starts = [event for event in starts if event.step not in changed]
    events = sorted([*run.metrics.events, *starts, *changes], key=lambda event: event.step)
    marked = sum(len(found) for kind, found in run.metrics.marks.items() if kind != "skip")
    count = marked + skipped(run) + len(starts) + len(changes)
    return events[:MOST_EVENTS], max(count, len(events)) - len(events[:MOST_EVENTS])


def missing(run: Run, drawn: set[str]) -> list[str]:
    """One line for each picture that could not be drawn, with the reason."""
    lines = []
    if "loss" not in drawn:
        lines.append(f"Loss, learning rate, throughput: {METRICS} has no training step yet.")
    if "spans" not in drawn:
        lines.append(f"Span of every head, and by layer over time: {_why_unseen(run)}.")
    elif "spans_layers" not in drawn:
        lines.append("Spans by layer over time: there is one evaluation so far.")
    if "persistent_share" not in drawn:
        lines.append(f"Attention on persistent vectors, dead and dominant ones: {_why_no_persistent(run)}.")
    if "loss" in drawn and not run.observations.memory:
        lines.append(f"Memory: {_why_unseen(run)}.")
    return lines


def _why_unseen(run: Run) -> str:
    if not run.observations.there:
        return f"there is no {OBSERVATIONS} (older versions write none)"
    return f"{OBSERVATIONS} has no such record yet: they are made at evaluations"


def _why_no_persistent(run: Run) -> str:
    model = run.config.model
    if not run.observations.heads:
        return _why_unseen(run)
    if not model.persistent_memory_size:
        return f"the network ({model.variant}) has no persistent vectors"
    return f"they are not measured in networks of the variant {model.variant}"
