"""A report as files: index.html, which holds all of it, and the same pictures as PNGs beside it.

Each file is replaced as a whole, the page last. A picture of an earlier report that is not drawn any more is removed.
"""

import importlib.util
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron_allattn import __version__
from megatron_allattn.checkpoint.files import storage_errors, write_bytes_atomic, write_text_atomic
from megatron_allattn.checkpoint.run_folder import METRICS, check_outside
from megatron_allattn.config.errors import UsageError, one_line, unreadable, usage_error
from megatron_allattn.report import facts, figures, heads, page
from megatron_allattn.report.comparison import comparison_pictures, comparison_table, unit_of
from megatron_allattn.report.run import Run, read_run
from megatron_allattn.report.style import SERIES, Picture, as_png

FOLDER, PAGE = "report", "index.html"
_PICTURES = (
    *("loss", "loss_late", "rate", "speed", "spans", "spans_time", "spans_layers", "persistent_share"),
    *("effective_vectors", "largest_vector", "dead_vectors", "valid", "train"),
)

Drawn = list[tuple[Picture, bytes]]


def write_report(run_folder: Path, output: Path | None = None) -> Path:
    """Draw the report of a run, in any state it may be in, into RUN/report or `output`; returns its page.

    Raises UsageError: matplotlib is absent, the folder is no run's, a file of it cannot be read, or `output` holds
    another page; StorageError.
    """
    check_matplotlib()
    run = read_run(run_folder)
    output = _prepared(run_folder / FOLDER if output is None else output)
    curves = _drawn([figures.loss_picture(run), figures.late_loss_picture(run)] if len(run.metrics.loss) else [])
    others = [figures.rate_picture(run), figures.speed_picture(run)] if len(run.metrics.loss) else []
    curves += _drawn(others)
    found = [heads.heads_picture(run, heads.SPANS), heads.spans_picture(run), heads.layers_picture(run)]
    spans = _drawn(found)
    persistent = _drawn([heads.heads_picture(run, quantity) for quantity in heads.QUANTITIES])
    drawn = curves + spans + persistent
    events, more = facts.happened(run)
    state = (run.outcome.how if run.outcome else "unknown", facts.state_of(run))
    body = [
        page.heading(run.name, facts.model_line(run.config.model), state),
        "<main>",
        page.numbers(facts.headline(run)),
        page.facts_list(facts.table(run)),
        page.pictures("Course of training", curves),
        page.pictures("How far heads look", spans),
        page.pictures("Persistent vectors", persistent),
        page.events_table(events, more),
        page.missing_list(facts.missing(run, {picture.name for picture, _ in drawn})),
        "</main>",
        _footer([run]),
    ]
    return _write(output, page.page(f"{run.name}: run report", body), drawn)


def tell_report(run_folder: Path) -> None:
    """Draw the report of a run that is done, and say where it is; or in a line why there is none, which is no fault of
    the run's."""
    try:
        print(f"report: {write_report(run_folder)}", flush=True)
    except UsageError as error:
        print(f"note: no report: {error}", flush=True)
    except Exception as error:  # whatever a drawing library meets
        print(f"warning: no report: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def write_comparison(run_folders: Sequence[Path], output: Path) -> Path:
    """Draw several runs on one page, in the folder `output`; returns the page. Raises what `write_report` does."""
    check_matplotlib()
    runs = _told_apart([read_run(folder) for folder in run_folders])
    output = _prepared(output)
    drawn = _drawn(comparison_pictures(runs))
    curves = [one for one in drawn if one[0].name in ("valid", "train", "spans_time", "speed")]
    header, rows = comparison_table(runs)
    colors = [SERIES[number % len(SERIES)] for number in range(len(runs))]
    body = [
        page.heading(f"{len(runs)} runs", "side by side, a colour each"),
        "<main>",
        f"<section><h2>Runs</h2>{page.runs_table(header, rows, colors)}</section>",
        page.pictures("Curves", curves),
        page.pictures("Heads", [one for one in drawn if one not in curves]),
        page.missing_list(_not_compared(runs)),
        "</main>",
        _footer(runs),
    ]
    return _write(output, page.page(f"{len(runs)} runs: comparison", body), drawn)


def check_matplotlib() -> None:
    """Raises UsageError where it is absent."""
    if importlib.util.find_spec("matplotlib") is None:
        raise usage_error("report", "pictures", "need matplotlib, which is not installed", "pip install matplotlib")


def _told_apart(runs: list[Run]) -> list[Run]:
    """Runs of equal names get their folders' paths instead."""
    count = Counter(run.name for run in runs)
    named = [replace(run, name=one_line(str(run.folder))) if count[run.name] > 1 else run for run in runs]
    for name, number in Counter(run.name for run in named).items():
        if number > 1:
            raise usage_error("run folder", name, "is given twice", "give it once")
    return named


def _not_compared(runs: Sequence[Run]) -> list[str]:
    lines = [f"{run.name}: {line}" for run in runs for line in facts.missing(run, _shown(run))]
    units = {run.metrics.unit for run in runs if len(run.metrics.loss)}
    if len(units) > 1 and unit_of(runs) == "nats":
        lines.insert(0, "Bits per character and perplexity: runs differ in it, so losses are in nats per token.")
    return lines


def _shown(run: Run) -> set[str]:
    """Pictures that this run has a part in."""
    newest = run.observations.heads[-1] if run.observations.heads else None
    shown = {"loss"} if len(run.metrics.loss) else set()
    if newest is not None:
        shown |= {"spans", "spans_layers"}
        shown |= {"persistent_share"} if newest.persistent_share is not None else set()
    return shown


def _drawn(found: Sequence[Picture | None]) -> Drawn:
    return [(picture, as_png(picture.figure)) for picture in found if picture is not None]


def _prepared(output: Path) -> Path:
    """The folder, made. Raises UsageError for one within checkpoints or that holds somebody else's page."""
    check_outside("--output", output)
    existing = output / PAGE
    try:
        if existing.exists():
            with existing.open("rb") as handle:
                ours = page.GENERATOR.encode() in handle.read(1000)
            if not ours:
                raise usage_error("--output", output, f"holds another {PAGE}", "name another folder or remove it")
    except OSError as error:
        raise unreadable("file", existing, error, "name another folder or remove it") from None
    with storage_errors(output, 0):
        output.mkdir(parents=True, exist_ok=True)
    return output


def _write(output: Path, html: str, drawn: Drawn) -> Path:
    """Pictures, then the page that belongs to them. Raises StorageError."""
    names = {picture.name for picture, _ in drawn}
    for picture, png in drawn:
        write_bytes_atomic(output / f"{picture.name}.png", png)
    write_text_atomic(output / PAGE, html)
    with storage_errors(output, 0):
        for name in set(_PICTURES) - names:
            (output / f"{name}.png").unlink(missing_ok=True)
    return output / PAGE


def _footer(runs: Sequence[Run]) -> str:
    unknown: Counter[str] = Counter()
    for run in runs:
        unknown.update(run.metrics.unknown)
    kinds = ", ".join(f"{count:,} of kind {kind}" for kind, count in unknown.items())
    left_out = f" Records that this version does not know were left out of {METRICS}: {kinds}." if unknown else ""
    folders = ", ".join(str(run.folder) for run in runs)
    return f"<footer>{page.text(f'Drawn by megatron_allattn {__version__} from {folders}.{left_out}')}</footer>"
