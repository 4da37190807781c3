"""One HTML page with everything in it: it opens without a network, from a disk or a mail, and runs no script.

A policy in its head forbids the page to load anything but the pictures in it. All text is escaped.
"""

import base64
from collections.abc import Sequence
from html import escape

from megatron_allattn.config.errors import one_line
from megatron_allattn.report.metrics import Event
from megatron_allattn.report.style import Picture

GENERATOR = "megatron_allattn report"

_STYLE = """
:root { color-scheme: light dark; --paper: #f6f7f9; --card: #ffffff; --ink: #22262b; --faint: #5b6470; --line: #e1e4e8;
  --accent: #0072b2; --good: #00734f; --bad: #b3261e }
@media (prefers-color-scheme: dark) {
  :root { --paper: #0e1013; --card: #17191d; --ink: #e4e6ea; --faint: #9aa3af; --line: #2b2f36; --accent: #5ab0e6;
    --good: #4cc79a; --bad: #ff8a80 }
  figure img { filter: invert(0.91) hue-rotate(180deg) }
}
* { box-sizing: border-box }
body { margin: 0; background: var(--paper); color: var(--ink); line-height: 1.45;
  font: 15px/1.45 system-ui, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif }
main, header, footer { max-width: 1240px; margin: 0 auto; padding: 0 20px }
header { padding-top: 28px }
h1 { font-size: 26px; margin: 0 0 4px; overflow-wrap: anywhere; line-height: 1.2 }
h2 { font-size: 18px; margin: 32px 0 12px }
.lead { color: var(--faint); margin: 0; overflow-wrap: anywhere }
.state { display: inline-block; border: 1px solid currentColor; border-radius: 999px; padding: 1px 10px;
  font-size: 13px; margin-left: 8px; vertical-align: 4px; color: var(--faint); font-weight: 500; white-space: nowrap }
.state.done { color: var(--good) } .state.failed, .state.guard { color: var(--bad) }
.numbers { display: flex; flex-wrap: wrap; gap: 12px; margin: 20px 0 0; padding: 0; list-style: none }
.numbers li { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 10px 16px;
  flex: 1 1 150px; min-width: 0 }
.numbers b { display: block; font-size: 24px; line-height: 1.2; font-weight: 650; color: var(--accent);
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere }
.numbers span { color: var(--faint); font-size: 13px }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 0 28px;
  margin: 16px 0 0;  background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 6px 16px }
.facts div { display: flex; gap: 12px; padding: 6px 0; border-bottom: 1px solid var(--line); min-width: 0 }
.facts dt { flex: 0 0 128px; color: var(--faint) }
.facts dd { margin: 0; min-width: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 520px), 1fr)); gap: 16px }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px;
  min-width: 0 }
figure h3 { font-size: 15px; margin: 0 0 8px }
figure img { display: block; width: 100%; height: auto }
figcaption { color: var(--faint); font-size: 13px; margin-top: 8px; overflow-wrap: anywhere }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px }
table { border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: 7px 12px; border-bottom: 1px solid var(--line); vertical-align: top }
th { color: var(--faint); font-weight: 500; white-space: nowrap }
tr:last-child td { border-bottom: 0 }
td { overflow-wrap: anywhere }
.stacked td { overflow-wrap: normal; white-space: nowrap }
.stacked td > span { display: inline-block; max-width: 200px; white-space: normal; overflow-wrap: break-word }
.stacked td:first-child > span { min-width: 150px }
.events td:nth-child(-n+2) { white-space: nowrap; overflow-wrap: normal }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 8px }
ul.missing { color: var(--faint); padding-left: 18px; overflow-wrap: anywhere }
footer { color: var(--faint); font-size: 13px; padding-top: 28px; padding-bottom: 36px; overflow-wrap: anywhere }
@media (max-width: 700px) {
  main, header, footer { padding-left: 12px; padding-right: 12px }
  figure { padding: 10px 6px } figure h3, figcaption { padding: 0 6px } .facts dt { flex-basis: 104px }
  table.stacked thead { display: none }
  table.stacked tr { display: block; padding: 8px 0; border-bottom: 1px solid var(--line) }
  table.stacked td { display: flex; gap: 12px; border: 0; padding: 3px 12px }
  table.stacked td > span { min-width: 0; max-width: none; overflow-wrap: anywhere }
  table.stacked td::before { content: attr(data-name); flex: 0 0 112px; color: var(--faint); overflow-wrap: normal }
  .events td { padding: 6px 8px }
}
"""


def page(title: str, body: Sequence[str]) -> str:
    """The whole file, of parts that are HTML already."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta name="generator" content="{GENERATOR}">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',
            f"<title>{text(title)}</title>",
            f"<style>{_STYLE}</style>",
            "</head>",
            "<body>",
            *body,
            "</body>",
            "</html>\n",
        ]
    )


def text(words: str) -> str:
    """Escaped, with what cannot be printed as escapes."""
    return escape(one_line(words))


def heading(title: str, lead: str, state: tuple[str, str] | None = None) -> str:
    """state: how the run has ended, as a word and in words."""
    chip = f'<span class="state {text(state[0])}">{text(state[1])}</span>' if state else ""
    return f'<header><h1>{text(title)}{chip}</h1><p class="lead">{text(lead)}</p></header>'


def numbers(found: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<li><b>{text(value)}</b><span>{text(what)}</span></li>" for value, what in found)
    return f'<ul class="numbers">{items}</ul>'


def facts_list(rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    items = (f"<div><dt>{text(name)}</dt><dd>{'<br>'.join(map(text, lines))}</dd></div>" for name, lines in rows)
    return f'<dl class="facts">{"".join(items)}</dl>'


def pictures(title: str, found: Sequence[tuple[Picture, bytes]]) -> str:
    """A section of pictures, each with its PNG."""
    if not found:
        return ""
    figures = "".join(_figure(*one) for one in found)
    return f'<section><h2>{text(title)}</h2><div class="pictures">{figures}</div></section>'


def _figure(picture: Picture, png: bytes) -> str:
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))  # of the PNG's header
    image = (
        f'<img alt="{text(picture.alt)}" width="{width}" height="{height}" '
        f'src="data:image/png;base64,{base64.b64encode(png).decode()}">'
    )
    return f"<figure><h3>{text(picture.title)}</h3>{image}<figcaption>{text(picture.caption)}</figcaption></figure>"


def events_table(events: Sequence[Event], more: int) -> str:
    """What has happened; `more`: how many events are not in it."""
    if not events:
        return ""
    rows = "".join(
        f"<tr><td>{one.step:,}</td><td>{text(NAMES[one.kind])}</td><td>{text(one.told)}</td></tr>" for one in events
    )
    rest = f'<p class="lead">and {more:,} more, which the curves mark</p>' if more > 0 else ""
    head = "<thead><tr><th>step</th><th>what</th><th></th></tr></thead>"
    body = f'<div class="scroll"><table class="events">{head}<tbody>{rows}</tbody></table></div>'
    return f"<section><h2>What happened</h2>{body}{rest}</section>"


NAMES = {
    "restart": "restart",
    "other layout": "other layout",
    "skip": "update left out",
    "spike": "loss spike",
    "override": "other settings",
    "plateau": "plateau",
}
"""Kinds of events as the curves' legend names them."""


def runs_table(header: Sequence[str], rows: Sequence[Sequence[str]], colors: Sequence[str]) -> str:
    """One row a run, behind its colour; on narrow screens one block a run."""
    head = "".join(f"<th>{text(name)}</th>" for name in header)
    lines = []
    for row, color in zip(rows, colors, strict=True):
        cells = []
        for number, (name, value) in enumerate(zip(header, row, strict=True)):
            swatch = f'<span class="swatch" style="background:{color}"></span>' if number == 0 else ""
            cells.append(f'<td data-name="{text(name)}"><span>{swatch}{text(value)}</span></td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    table = f'<table class="stacked"><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def missing_list(lines: Sequence[str]) -> str:
    if not lines:
        return ""
    items = "".join(f"<li>{text(line)}</li>" for line in lines)
    return f'<section><h2>Not shown</h2><ul class="missing">{items}</ul></section>'
