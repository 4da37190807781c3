"""A run as lines of text for a terminal of a given size, from 40 columns on; whatever is unknown is left out."""

from collections.abc import Iterable, Sequence

from rich.text import Text

from megatron_allattn.config.durations import clock
from megatron_allattn.config.errors import one_line
from megatron_allattn.watching.curve import drawn
from megatron_allattn.watching.progress import number
from megatron_allattn.watching.standing import How
from megatron_allattn.watching.tail import Record
from megatron_allattn.watching.view import View

LABEL = 7  # columns
CHART_ROWS = 6
LONGEST_CURVE = 120  # columns
_STYLES: dict[How, str] = {
    "starting": "cyan",
    "running": "green",
    "quiet": "yellow",
    "gone": "bold red",
    "done": "bold green",
    "stopped": "yellow",
    "guard": "bold red",
    "failed": "bold red",
}


def lines(view: View, width: int, height: int | None, *, plain: bool, keys: bool) -> list[Text]:
    """The run in at most `height` lines: without them all the curve goes first, then what is lowest.

    plain: in ASCII; keys: say how it is closed.
    """
    text = [*_header(view, width, plain=plain)]
    body = [*_records(view, width), *_events(view, width)]
    footer = [Text("q closes this view, not the run", style="dim")] if keys else []
    left = CHART_ROWS + 1 if height is None else height - len(text) - len(body) - len(footer)
    chart = _chart(view, width, min(CHART_ROWS, left - 1), plain=plain)
    shown = [*text, *chart, *body]
    return (shown if height is None else shown[: height - len(footer)]) + footer


def _header(view: View, width: int, *, plain: bool) -> Iterable[Text]:
    recipe = "" if view.config is None else f"{view.config.recipe or 'custom'} · "
    yield _cut(Text(one_line(f"{recipe}{view.folder}"), style="bold"), width, plain=plain)
    standing = view.standing
    for line in _wrapped(standing.text.split(" "), width, " "):
        yield Text(line, style=_STYLES[standing.how])
    if view.reading:
        yield Text("reading what there is so far …", style="dim")
    step, last = view.progress.step, view.last_step
    parts = [f"step {step:,}" + (f" of {last:,}" if last else "")]
    if last and step <= last:
        parts.append(f"{100 * step / last:.0f} %")
        seconds = view.progress.step_seconds
        if seconds is not None and step < last and standing.how in ("running", "quiet"):
            parts.append(f"{clock(seconds * (last - step))} left without evaluations")
    yield from _row("", parts, width)
    if last and step <= last:
        full = round(min(width, 60) * step / last)
        done, rest = ("=", "-") if plain else ("━", "─")
        yield Text(done * full, style="green").append(rest * (min(width, 60) - full), style="dim")
    if layout := _layout(view):
        yield from _row("layout", layout, width)


def _layout(view: View) -> list[str]:
    """TP 2, PP 1, DP 4, ZeRO 1, bf16, processes 8, cpu: of the last start on record, or of the configuration."""
    start, config = view.start, view.config
    if start:
        forms = {"tensor": "TP {}", "pipeline": "PP {}", "data": "DP {}", "zero_stage": "ZeRO {}", "precision": "{}"}
        forms |= {"world_size": "processes {}", "device": "{}"}
        return [one_line(form.format(start[name])) for name, form in forms.items() if name in start]
    if config is None:
        return []
    parallel, training = config.parallel, config.training
    precision = "bf16" if training.bf16 else "fp16" if training.fp16 else "fp32"
    sizes = [f"TP {parallel.tensor_model_parallel_size}", f"PP {parallel.pipeline_model_parallel_size}"]
    return [*sizes, f"ZeRO {parallel.zero_stage}", precision]


def _records(view: View, width: int) -> Iterable[Text]:
    last = view.progress.last
    if (train := last.get("train")) is not None:
        parts = [*_losses(train), *_number(train, "lr", "lr {:.2e}"), *_number(train, "grad_norm", "grad norm {:.3g}")]
        yield from _row("train", parts, width)
    for kind in ("valid", "test"):
        if (record := last.get(kind)) is not None:
            parts = [*_losses(record), f"step {record['step']:,}"]
            if kind == "valid" and (best := view.progress.best) is not None and best is not record:
                parts.append(f"best {number(best, 'loss'):.4f} at step {best['step']:,}")
            yield from _row(kind, parts, width)
    if train is not None:
        spans = [*_number(train, "span_mean", "mean {:,.0f}"), *_number(train, "span_max", "longest {:,.0f}")]
        yield from _row("spans", spans, width)
        speed = [*_number(train, "tokens_per_second", "{:,.0f} tokens/s")]
        if (seconds := view.progress.step_seconds) is not None:
            speed.append(f"{seconds:.3g} s a step")
        speed += _number(train, "tokens", "{:,.0f} tokens so far")
        yield from _row("speed", speed, width)
    if (peak := number(view.memory, "peak_bytes")) is not None:
        yield from _row("memory", [f"{peak / 2**30:.2f} GiB at most"], width)


def _events(view: View, width: int) -> Iterable[Text]:
    counts, train = view.progress.counts, view.progress.last.get("train", {})
    events = [
        *_number(train, "skipped", "skipped {:,.0f}"),
        f"spikes {counts['spike']:,}",
        f"restarts {view.restarts:,}",
        *([f"with other settings {counts['override']:,}"] if counts["override"] else []),
    ]
    if counts:
        yield from _row("events", events, width)
    if (plateau := view.progress.last.get("plateau")) is not None:
        yield from _row("plateau", [f"at step {plateau['step']:,}", *_number(plateau, "lr", "lr {:.2e} since")], width)
    for note in view.notes:
        for line in _wrapped(f"note: {one_line(note)}".split(" "), width, " "):
            yield Text(line, style="yellow")


def _chart(view: View, width: int, rows: int, *, plain: bool) -> list[Text]:
    """The curve of the training loss in `rows` lines under one that tells its ends; nothing where that is too few."""
    losses, train = view.progress.losses, view.progress.last.get("train", {})
    columns = losses.columns(min(width, LONGEST_CURVE))
    if rows < 1 or len(columns) < 2 or losses.first is None:
        return []
    now = number(train, "loss")
    parts = [f"{losses.first:.4f} → {'not finite' if now is None else f'{now:.4f}'}", f"lowest {losses.lowest:.4f}"]
    title = _row("loss", parts, width)[:1]
    return [*title, *(Text(line, style="cyan") for line in drawn(columns, rows, plain=plain))]


def _losses(record: Record) -> list[str]:
    loss = number(record, "loss")
    parts = ["loss not finite" if loss is None else f"loss {loss:.4f}"]
    return [*parts, *_number(record, "bpc", "bpc {:.4f}"), *_number(record, "ppl", "ppl {:.4g}")]


def _number(record: Record, name: str, form: str) -> list[str]:
    value = number(record, name)
    return [] if value is None else [form.format(value)]


def _row(label: str, parts: Sequence[str], width: int) -> list[Text]:
    """A label, and parts beside it on as many lines as they need."""
    indent = LABEL + 1 if label else 0
    texts = _wrapped(parts, width - indent, " · ")
    return [
        Text(f"{label if i == 0 else '':<{indent}}", style="dim").append(text, style="default")
        for i, text in enumerate(texts)
    ]


def _wrapped(parts: Sequence[str], width: int, between: str) -> list[str]:
    """The parts in lines of at most `width` columns, unless one is longer."""
    found: list[str] = []
    for part in parts:
        if found and len(found[-1]) + len(between) + len(part) <= width:
            found[-1] += between + part
        else:
            found.append(part)
    return found


def _cut(text: Text, width: int, *, plain: bool) -> Text:
    """What is too long loses its middle: a path's end tells most."""
    if len(text) <= width:
        return text
    mark = "..." if plain else "…"
    head = (width - len(mark)) // 3
    shown = text.plain
    return Text(shown[:head] + mark + shown[len(shown) - (width - len(mark) - head) :], style=text.style)
