"""Pictures of the pages for the docs: `python -m benchmarks.screenshots RUN_DIR SWEEP_DIR`, in Debian's Chromium."""

import argparse
import shutil
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from grpo.reporting.page import write_report

DOCS = Path(__file__).resolve().parents[1] / "docs"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
SIZES: dict[str, dict[str, Any]] = {
    "desktop": {"viewport": {"width": 1280, "height": 1280}, "color_scheme": "light"},
    "phone": {"viewport": {"width": 390, "height": 1100}, "color_scheme": "dark", "device_scale_factor": 1.5},
}


def main() -> None:
    """Write the pages and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("sweep", type=Path)
    asked = parser.parse_args()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for name in ("run", "sweep"):
            file = write_report(getattr(asked, name)).resolve()
            for size, options in SIZES.items():
                page = browser.new_page(**options)
                page.goto(file.as_uri())
                height = page.evaluate("document.documentElement.getBoundingClientRect().height")
                clip = {"x": 0, "y": 0, **options["viewport"], "height": min(height, options["viewport"]["height"])}
                page.screenshot(path=DOCS / f"{name}_{size}.png", clip=clip)
        browser.close()


if __name__ == "__main__":
    main()
