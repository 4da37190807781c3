"""The page as a reader opens it, in headless Chromium, at the width of a desk and of a phone."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("playwright")

from playwright.sync_api import sync_playwright

from megatron_allattn.report import write_comparison, write_report
from tests.report.synthetic import evaluation, heads_at, known_run, run_folder, train

HOSTILE = """<img src=x onerror=alert(1)>&"'$x_1^2$ </title><script>alert(2)<"""
CHROMIUM = shutil.which("chromium")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (make system-deps)")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_playwright() as started:
        # root, as in a container, has no sandbox
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    hostile = HOSTILE.replace("/", "∕")  # no folder has a / in its name
    spoiled = [train(step) for step in range(1, 30)]
    spoiled.append({"kind": "skip", "step": 29, "reason": HOSTILE})
    spoiled.append({"kind": "override", "step": 29, "changes": {HOSTILE: [HOSTILE, HOSTILE * 20]}})
    outcome = {"outcome": "failed", "step": 29, "reason": HOSTILE + "x" * 300}
    runs = [
        known_run(folder / "known"),
        run_folder(folder / hostile, spoiled, [heads_at(29)], outcome=outcome),
        run_folder(folder / ("long-name-" * 20), [train(step) for step in range(1, 5)] + [evaluation("valid", 4)]),
    ]
    empty = run_folder(folder / "empty")
    return {
        "known": write_report(runs[0]),
        "hostile": write_report(runs[1]),
        "empty": write_report(empty),
        "comparison": write_comparison([*runs, empty], folder / "comparison"),
    }


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize(("name", "pictures"), [("known", 11), ("hostile", 9), ("empty", 0), ("comparison", 9)])
def test_page(browser: Any, pages: dict[str, Path], name: str, pictures: int, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    said: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    page.on("request", lambda request: requests.append(request.url))
    try:
        address = pages[name].resolve().as_uri()
        page.goto(address)
        assert [url for url in requests if not url.startswith("data:")] == [address]
        found = page.eval_on_selector_all(
            "img", "all => all.map(i => [i.naturalWidth, i.alt.length, i.clientWidth, i.src.slice(0, 22)])"
        )
        assert len(found) == pictures
        for natural, alt, shown, source in found:
            assert natural > 0 and alt > 20 and source == "data:image/png;base64,"
            assert 330 <= shown <= width  # most of a phone's width
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate("document.scripts.length") == 0
        outside = page.evaluate(_OUTSIDE)
        assert outside == []
        assert said == []
    finally:
        page.close()


_OUTSIDE = """() => [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll'))
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"""


def test_names_are_shown_as_they_are(browser: Any, pages: dict[str, Path]) -> None:
    page = browser.new_page()
    try:
        page.goto(pages["hostile"].resolve().as_uri())
        assert page.inner_text("h1").startswith(HOSTILE.replace("/", "∕"))
        assert HOSTILE in page.inner_text(".facts")
        assert HOSTILE in page.inner_text(".events")
        assert page.title() == HOSTILE.replace("/", "∕") + ": run report"
    finally:
        page.close()


def test_a_dark_page_has_dark_pictures(browser: Any, pages: dict[str, Path]) -> None:
    """Of the page's own colours and the pictures', which a filter turns over."""
    filters = {}
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme)
        page = context.new_page()
        page.goto(pages["known"].resolve().as_uri())
        filters[scheme] = page.eval_on_selector("figure img", "image => getComputedStyle(image).filter")
        back = page.eval_on_selector("body", "body => getComputedStyle(body).backgroundColor")
        assert (min(map(int, back[4:-1].split(","))) > 200) == (scheme == "light")
        context.close()
    assert filters["light"] == "none" and filters["dark"].startswith("invert")
