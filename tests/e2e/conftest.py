"""A browser for the tests of pages: headless Chromium, Debian's package."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator:
    playwright = pytest.importorskip("playwright.sync_api", reason="make extras installs it")
    if CHROMIUM is None:
        pytest.skip("apt install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS, "--disable-component-update"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser):
    """A function from a page's file to the page in the browser; its requests, messages and errors are in `noted`."""
    contexts = []

    def open_page(file: Path, size: dict = DESKTOP, link: str = "", drawn: bool = True, **options):
        contexts.append(browser.new_context(viewport=size, **options))
        page = contexts[-1].new_page()
        page.noted = []
        page.on("request", lambda request: page.noted.append(request.url))
        page.on("console", lambda message: page.noted.append(message.text))
        page.on("pageerror", lambda error: page.noted.append(str(error)))
        page.goto(file.resolve().as_uri() + link)
        if drawn and page.locator(".chart").count():
            page.locator("body[data-drawn]").wait_for()
        return page

    yield open_page
    for context in contexts:
        context.close()


def fits(page) -> bool:
    """Whether a page is no wider than its window."""
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def problems_of_access(page) -> list[str]:
    """What keeps some from reading a page, by axe's rules of WCAG A and AA, contrast included."""
    from axe_playwright_python.sync_playwright import Axe

    page.evaluate("() => 0")
    found = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]})
    return [f"{one['id']}: {node['html'][:150]}" for one in found.response["violations"] for node in one["nodes"]]
