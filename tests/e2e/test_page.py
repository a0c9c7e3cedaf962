"""The page in headless Chromium, Debian's package: text of a model neither runs in it nor breaks it."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo.reporting.page import write_report
from grpo.runs.sweep_dir import SWEEP
from tests.page_fixtures import HOSTILE, write_run

playwright = pytest.importorskip("playwright.sync_api", reason="make extras installs it")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="apt install chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS, "--disable-component-update"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser):
    """A function from a page's file to the page in the browser; its requests, messages and errors are in `noted`."""
    contexts = []

    def open_page(file: Path, size: dict = DESKTOP, **options):
        contexts.append(browser.new_context(viewport=size, **options))
        page = contexts[-1].new_page()
        page.noted = []
        page.on("request", lambda request: page.noted.append(request.url))
        page.on("console", lambda message: page.noted.append(message.text))
        page.on("pageerror", lambda error: page.noted.append(str(error)))
        page.goto(file.resolve().as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()


def fits(page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_is_readable_on_a_phone_and_a_desktop_in_the_light_and_in_the_dark(
    size, scheme, composed, tmp_path, opened
):
    file = write_report(write_run(tmp_path / "run", steps=30, groups=2, generations=4))
    page = opened(file, size, color_scheme=scheme)
    assert fits(page)
    assert page.noted == [file.resolve().as_uri()]
    light, dark = "rgb(255, 255, 255)", "rgb(17, 21, 26)"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == {"light": light, "dark": dark}[scheme]
    assert page.locator(".charts svg").count() == page.locator("figcaption").count() > 10
    assert len(page.screenshot(full_page=True)) > 50_000


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_model_wrote_neither_runs_nor_breaks_the_page(text, composed, tmp_path, opened):
    file = write_report(write_run(tmp_path / "run", steps=2, groups=2, generations=4, text=text))
    page = opened(file, PHONE)
    assert page.noted == [file.resolve().as_uri()]
    assert page.title().startswith("GRPO run")
    assert page.locator("h1").count() == 1
    assert page.locator(".group").count() == 2
    assert page.locator(".group img, .group script, .group style").count() == 0
    assert fits(page)
    shown = page.locator(".completion pre").first
    assert "answer" in shown.text_content()
    if len(text) < 100 and "\ud83d" not in text and "\x00" not in text:
        assert shown.text_content().startswith(text)
    assert shown.bounding_box()["height"] < 400


def test_a_script_that_got_into_the_page_all_the_same_would_not_run(composed, tmp_path, opened):
    file = write_report(write_run(tmp_path / "run", steps=2, groups=1, generations=2))
    file.write_text(
        file.read_text().replace("<main>", "<main><script>document.title = 'stolen'</script><img src='x.png'>")
    )
    page = opened(file)
    assert page.title().startswith("GRPO run")
    assert [message for message in page.noted if "Content Security Policy" in message]
    assert page.locator(".group").count() == 1


def test_completions_are_chosen_by_step_and_by_reward(composed, tmp_path, opened):
    file = write_report(write_run(tmp_path / "run", steps=3, groups=2, generations=4))
    page = opened(file)
    assert page.locator("#number").text_content() == "3"
    page.locator("#step").fill("0")
    assert page.locator("#number").text_content() == "1"
    pair = page.locator(".group").first.locator(".pair .completion h4")
    assert [text.split(" (")[0] for text in pair.all_text_contents()] == ["best: reward 1", "worst: reward 0"]
    page.locator("summary").first.click()
    between = page.locator(".group").first.locator("details .completion")
    between.nth(1).wait_for()
    assert between.count() == 2
    page.locator("#order").select_option("lowest")
    assert page.locator(".completion h4").first.text_content().startswith("reward 0 ")
    page.locator("#order").select_option("highest")
    assert page.locator(".completion h4").first.text_content().startswith("reward 1 ")
    page.locator("#all").check()
    assert page.locator("#count").text_content() == "24 completions"
    assert page.locator(".group").count() == 20
    page.locator("#more").click()
    assert page.locator(".group").count() == 24


def test_ten_thousand_steps_make_a_small_page_that_opens_at_once(composed, tmp_path, opened):
    folder = write_run(tmp_path / "run", steps=10_000, groups=2, generations=5, text="a sentence of some length " * 8)
    file = write_report(folder)
    assert file.stat().st_size < 5_000_000
    start = time.monotonic()
    page = opened(file)
    assert page.locator(".group").count() == 2
    assert time.monotonic() - start < 2
    assert page.noted == [file.resolve().as_uri()]


def test_the_page_of_a_sweep_leads_to_its_jobs(composed, tmp_path, opened):
    for number in range(3):
        typed = (f"train.num_generations={2**number * 2}",)
        write_report(write_run(tmp_path / str(number), steps=3, groups=1, generations=2, typed=typed))
    (tmp_path / SWEEP).write_text(json.dumps({"overrides": [], "comparison": None}))
    page = opened(write_report(tmp_path), PHONE)
    assert fits(page)
    assert page.locator("table tr").count() == 4
    assert page.locator("figure svg").count() == 2
    page.locator("table a").nth(1).click()
    page.wait_for_url("**/1/report.html")
    assert page.title().endswith("/1")
    assert "train.num_generations=4" in page.locator("pre.command").text_content()


def test_a_page_prints_completely(composed, tmp_path, opened):
    page = opened(write_report(write_run(tmp_path / "run", steps=3, groups=2, generations=4)))
    page.emulate_media(media="print")
    assert not page.locator(".controls").is_visible()
    assert page.locator(".group").first.is_visible()
    assert page.pdf()[:5] == b"%PDF-"
