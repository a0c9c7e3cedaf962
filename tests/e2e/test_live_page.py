"""The page of a run that is not over, in headless Chromium: it reloads by itself, and its reader stays where they were.

The clock of the page is the test's (`page.clock`); the tests wait for a page whose time of writing is another.
"""

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from grpo.extras.page.watch import Server
from grpo.extras.testing.commands import Forked
from grpo.reporting.page import write_report
from grpo.rundir.sweep_dir import SWEEP
from tests.page_fixtures import write_run

playwright = pytest.importorskip("playwright.sync_api", reason="make extras installs it")
pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
DUE = 60_000
"""Milliseconds after which a page that has just been written is due to reload."""


@pytest.fixture
def opened(browser) -> Iterator[Callable[..., Any]]:
    """A function from an address to the page in the browser; its messages and errors are in `noted`."""
    contexts = []

    def open_page(address: str):
        contexts.append(browser.new_context(viewport={"width": 1280, "height": 900}))
        page = contexts[-1].new_page()
        page.clock.install()
        page.noted = []
        page.on("console", lambda message: page.noted.append(message.text))
        page.on("pageerror", lambda error: page.noted.append(str(error)))
        page.goto(address)
        page.locator("body[data-drawn]").wait_for()
        return page

    yield open_page
    for context in contexts:
        context.close()


def stamp(page) -> str | None:
    """When the page was written, as it says; None for that of a run that is over."""
    return page.locator("body").get_attribute("data-written")


def reloaded(page, before: str | None) -> None:
    """Wait for a page that was written later, or for the last one; the same one may come again before."""
    later = page.locator(f"body[data-drawn]:not([data-written='{before}'])")
    for _ in range(20):
        page.clock.fast_forward(DUE)
        with contextlib.suppress(playwright.TimeoutError):
            later.wait_for(timeout=3_000)
            return
    pytest.fail("the page has not reloaded")


def running(folder: Path, steps: int = 30) -> str:
    """Write a run that is not over, or write it anew, and its page; return the page's address."""
    if not folder.exists():
        write_run(folder, steps=steps, groups=3, generations=6, text="a sentence of some length " * 4)
        (folder / "summary.json").write_text(json.dumps({"status": "running", "reason": None}))
    return write_report(folder).resolve().as_uri()


def top(page, selector: str) -> float:
    return page.locator(selector).first.bounding_box()["y"]


@pytest.mark.long
def test_a_run_has_a_live_page_until_it_is_completed(tmp_path, opened):
    line = [sys.executable, str(HERE / "live_run.py"), f"hydra.run.dir={tmp_path / 'run'}", "train.max_steps=60"]
    line += ["task.dataset.size=512", "task.eval.size=8", "train.save_strategy=no"]
    with Forked(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as run:
        try:
            file = tmp_path / "run" / "report.html"
            deadline = time.monotonic() + 120
            while not file.exists():
                assert run.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            page = opened(file.as_uri() + "#step=1")
            assert page.locator("p.running strong").text_content() == "running"
            assert page.locator("#number").text_content() == "1"
            page.evaluate("scrollBy(0, -200)")
            place, before = top(page, "#browse"), stamp(page)
            reloaded(page, before)
            assert run.poll() is None
            assert page.url.endswith("#step=1")
            assert page.locator("#number").text_content() == "1"
            assert top(page, "#browse") == pytest.approx(place, abs=2)
            assert stamp(page) > before
            assert run.wait(300) == 0
            reloaded(page, stamp(page))
        finally:
            run.kill()
            run.communicate()
    assert page.locator("p.completed strong").text_content() == "completed"
    assert stamp(page) is None
    assert top(page, "#browse") == pytest.approx(place, abs=2)
    assert not page.locator("#live").count()
    assert [message for message in page.noted if "rror" in message or "Content Security" in message] == []
    page.evaluate("window.marked = true")
    page.clock.fast_forward(10 * DUE)
    assert page.evaluate("window.marked"), "the page of a run that is over does not reload"


def test_a_reload_keeps_what_the_reader_has_chosen(composed, tmp_path, opened):
    page = opened(running(tmp_path / "run"))
    page.locator("#step").fill("9")
    page.locator("#search").fill("answer")
    page.locator("#only").select_option("incorrect")
    page.locator("#order").select_option("shortest")
    page.locator("#smoothing").fill("0.5")
    page.locator("#log").check()
    page.locator("#metric").select_option("num_tokens")
    page.locator("#axis").select_option("tokens")
    page.locator("#axis").select_option("step")
    page.evaluate("dispatchEvent(new CustomEvent('zoom', { detail: [10, 20] }))")
    page.locator("#search").focus()
    page.evaluate("document.getElementById('search').setSelectionRange(1, 4)")
    page.locator("#completions .group").nth(4).scroll_into_view_if_needed()
    place, count = top(page, "#completions .group >> nth=4"), page.locator("#count").text_content()
    metrics = tmp_path / "run" / "metrics.jsonl"
    row = json.loads(metrics.read_text().splitlines()[-1])
    metrics.write_text(metrics.read_text() + json.dumps(row | {"step": 31, "reward": 0.0}) + "\n")
    before = stamp(page)
    running(tmp_path / "run")
    reloaded(page, before)
    assert page.locator("#number").text_content() == "10"
    values = {name: page.locator(f"#{name}").input_value() for name in ("search", "only", "order", "smoothing")}
    assert values == {"search": "answer", "only": "incorrect", "order": "shortest", "smoothing": "0.5"}
    assert page.locator("#log").is_checked()
    assert page.locator("figcaption").first.inner_text() == "num_tokens remove"
    assert page.locator("#count").text_content() == count
    assert top(page, "#completions .group >> nth=4") == pytest.approx(place, abs=2)
    assert page.locator("#whole").is_visible()
    labels = page.locator(".chart").nth(2).locator(".role-axis-label").first.locator("text").all_text_contents()
    assert 10 <= min(map(int, labels)) < max(map(int, labels)) <= 20
    selection = "((box) => [box.id, box.selectionStart, box.selectionEnd])(document.activeElement)"
    assert page.evaluate(selection) == ["search", 1, 4]
    assert [message for message in page.noted if "rror" in message] == []


def test_a_reload_keeps_what_the_reader_has_opened(composed, tmp_path, opened):
    page = opened(running(tmp_path / "run"))
    page.locator("#all").check()
    page.locator("#more").click()
    page.locator("#completions summary").nth(25).click()
    page.locator("#completions .group").nth(25).focus()
    assert page.locator("#completions .group").count() == 40
    before = stamp(page)
    running(tmp_path / "run")
    reloaded(page, before)
    assert page.locator("#all").is_checked()
    assert page.locator("#completions .group").count() == 40
    assert page.locator("#completions details[open]").count() == 1
    assert page.locator("#completions .group").nth(25).locator("details .completion").count() == 4
    active = "[...document.querySelectorAll('#completions > .group')].indexOf(document.activeElement)"
    assert page.evaluate(active) == 25


def test_who_has_not_gone_to_the_completions_sees_new_ones(composed, tmp_path, opened):
    folder = tmp_path / "run"
    page = opened(running(folder))
    assert page.locator("#number").text_content() == "30"
    last = folder / "completions" / "completions_00030.parquet"
    table = parquet.read_table(last).drop_columns(["step"])
    parquet.write_table(table.append_column("step", [[31] * len(table)]), last.with_name("completions_00031.parquet"))
    before = stamp(page)
    running(folder)
    reloaded(page, before)
    assert page.locator("#number").text_content() == "31"


@pytest.mark.parametrize("busy", ["dialog", "compare", "selection", "typing"])
def test_a_page_does_not_reload_under_a_busy_reader(busy, composed, tmp_path, opened):
    page = opened(running(tmp_path / "run"))
    before = stamp(page)
    page.evaluate("window.marked = true")
    page.clock.fast_forward(25_000)
    if busy == "dialog":
        page.keyboard.press("?")
    elif busy == "compare":
        page.get_by_role("button", name="compare").first.click()
    elif busy == "selection":
        page.evaluate("getSelection().selectAllChildren(document.querySelector('h1'))")
    running(tmp_path / "run")
    for _ in range(6):
        if busy == "typing":
            page.locator("#search").press("a")
        page.clock.run_for(4_000)
        assert page.evaluate("window.marked"), busy
    assert stamp(page) == before
    if busy == "dialog":
        page.keyboard.press("Escape")
    elif busy == "compare":
        page.locator("#separate").click()
    elif busy == "selection":
        page.evaluate("getSelection().removeAllRanges()")
    reloaded(page, before)
    if busy == "typing":
        assert page.locator("#search").input_value() == "aaaaaa"


@pytest.mark.long
def test_a_page_that_nobody_writes_reloads_seldom_and_stops(composed, tmp_path, opened):
    file = Path(running(tmp_path / "run").removeprefix("file://"))
    page = opened(file.as_uri())
    text, now = file.read_text(), int(stamp(page))
    for age, waits in ((20, 30), (200, 100), (7_000, 300), (100_000, None)):
        file.write_text(re.sub('data-written="[0-9]+"', f'data-written="{now - 1000 * age}"', text))
        page = opened(file.as_uri())
        page.evaluate("window.marked = true")
        page.clock.run_for(1000 * ((waits or 2_000) - 5))
        page.wait_for_timeout(2_000)  # in which a reload would begin
        assert page.evaluate("window.marked"), age
        if waits:
            with page.expect_navigation():
                page.clock.run_for(60_000)
            page.locator("body[data-drawn]").wait_for()
            assert not page.evaluate("window.marked"), age


def test_a_watched_sweep_leads_to_the_live_pages_of_its_jobs(composed, tmp_path, opened):
    for number in range(2):
        write_run(tmp_path / str(number), steps=3, groups=1, generations=2, typed=(f"train.seed={number}",))
    (tmp_path / "1" / "summary.json").write_text(json.dumps({"status": "running", "reason": None}))
    (tmp_path / SWEEP).write_text(json.dumps({"overrides": [], "comparison": None}))
    with Server(tmp_path, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = opened(f"http://localhost:{server.server_port}/")
        before = stamp(page)
        assert before, "a sweep with a running job reloads"
        (tmp_path / "1" / "summary.json").write_text((tmp_path / "0" / "summary.json").read_text())
        reloaded(page, before)
        assert page.locator("td.running").count() == 0
        page.locator("table a").nth(1).click()
        page.wait_for_url("**/1/report.html")
        assert page.locator("p.completed").count() == 1
        server.shutdown()
    assert not [message for message in page.noted if "rror" in message]
