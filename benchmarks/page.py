"""The page of a long run: seconds to write it and to open it in Chromium, and its size.

`python -m benchmarks.page` takes a minute on two cores. The runs have 1,000 steps of 128 completions with values per
token, and 10,000 steps of 10 completions.
"""

import tempfile
import time
from pathlib import Path

from hydra import initialize_config_dir
from playwright.sync_api import Browser, sync_playwright
from rich.console import Console
from rich.table import Table

from benchmarks.screenshots import FLAGS
from grpo.config.schema import ROOT, register
from grpo.reporting.page import write_report
from tests.page_fixtures import show_tokens, write_run

CHROMIUM = "/usr/bin/chromium"
TEXT = "First 3 and 4 are 7, then half of that is " + "3.5 apples and so on " * 15
RUNS = {"1,000 steps of 128": (1000, 16, 8), "10,000 steps of 10": (10_000, 2, 5)}
"""Steps, groups per step and completions per group."""


def opened(browser: Browser, file: Path) -> tuple[float, float]:
    """Return the seconds until a page shows its completions and its problems, and until all charts are drawn."""
    page = browser.new_page()
    start = time.perf_counter()
    page.goto(file.as_uri())
    page.locator(".group").first.wait_for()
    page.locator("#problems tr").first.wait_for()
    readable = time.perf_counter() - start
    page.locator("body[data-drawn]").wait_for()
    return readable, time.perf_counter() - start


def main() -> None:
    """Run the benchmark."""
    table = Table("run", "written, s", "MB", "readable, s", "all charts, s", title="The page of a long run")
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"), sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for name, size in RUNS.items():
            with tempfile.TemporaryDirectory() as folder:
                run = write_run(Path(folder) / "run", *size, text=TEXT)
                show_tokens(run, TEXT)
                start = time.perf_counter()
                file = write_report(run)
                written = time.perf_counter() - start
                times = opened(browser, file)
                table.add_row(
                    name, f"{written:.1f}", f"{file.stat().st_size / 1e6:.2f}", *(f"{one:.2f}" for one in times)
                )
        browser.close()
    Console().print(table)


if __name__ == "__main__":
    main()
