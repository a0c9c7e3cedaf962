"""Pictures of the pages for the docs, in Debian's Chromium: light and dark on a desktop, and on a phone.

`python -m benchmarks.screenshots` makes the runs itself, in a quarter of an hour on two cores, and takes all pictures;
`--run RUN_DIR` and the like take those of runs that there are. With `--to FOLDER` they go there, so that pictures
before and after a change can be compared.
"""

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from grpo.builtin.tasks import shapes
from grpo.config.schema import ROOT, register
from grpo.reporting.page import named, write_comparison, write_report
from grpo.reporting.render import PAGE
from tests.page_fixtures import show_images, write_run

DOCS = Path(__file__).resolve().parents[1] / "docs"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
PHONE = {"color_scheme": "dark", "device_scale_factor": 1.5, "is_mobile": True, "has_touch": True}
SIZES: dict[str, dict[str, Any]] = {
    "desktop": {"viewport": {"width": 1280, "height": 1280}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 1280}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 1100}, **PHONE},
}
KINDS = {
    "run": "directory of a run",
    "sweep": "directory of a sweep",
    "preflight": "directory of a preflight",
    "images": "directory of a run with images",
    "boxes": "directory of a run with boxes in images",
    "tools": "directory of a run with tools",
    "tokens": "directory of a run with values per token",
    "problems": "directory of a run that asks problems again",
}
RUNS = {
    "run": ["grpo.train", "completions.tokens=true", "train.max_steps=200"],
    "images": ["grpo.train", "+experiment=shapes", "train.max_steps=40"],
    "tools": ["grpo.train", "+experiment=calculator", "train.max_steps=40"],
    "sweep": ["grpo.train", "-m", "train.num_generations=4,8,16", "train.seed=0,1,2", "train.max_steps=40"],
    "preflight": ["grpo.preflight", "reward=[correctness,format]", "train.num_generations=4"],
}
"""Commands of the runs, by their kinds."""
TOPS = ("run", "sweep", "preflight")
"""Kinds of which the top of the page is taken, in all sizes."""
GROUPS = 2
"""Groups of completions on a picture of images."""


def main() -> None:
    """Write the pages that were asked for and take their pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    for kind, words in KINDS.items():
        parser.add_argument(f"--{kind}", type=Path, help=words)
    parser.add_argument("--compare", type=Path, nargs="+", help="directories of runs")
    parser.add_argument("--to", type=Path, default=DOCS, help="folder of the pictures")
    asked = {kind: folder for kind, folder in vars(parser.parse_args()).items() if folder}
    to = asked.pop("to")
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        take_all(asked or made(Path(folder) / "outputs"), to)


def made(folder: Path) -> dict[str, Any]:
    """Return the directories of runs of all kinds, which are made in a folder."""
    for kind, line in RUNS.items():
        where = f"hydra.{'sweep' if kind == 'sweep' else 'run'}.dir={folder / kind}"
        subprocess.run([sys.executable, "-m", *line, where], check=True)
    found: dict[str, Any] = {kind: folder / kind for kind in RUNS}
    found |= {"boxes": with_boxes(folder / "boxes"), "tokens": found["run"], "problems": found["run"]}
    return found | {"compare": [found["sweep"] / "0", found["sweep"] / "6"]}


def with_boxes(folder: Path) -> Path:
    """Write a run directory whose completions are boxes around shapes, correct ones and others; return it."""
    asked = [problem for problem in islice(shapes.problems("train"), 20) if not problem.counts][:GROUPS]
    boxes = [
        [[shape.left, shape.top, shape.left + shape.size, shape.top + shape.size] for shape in problem.shapes[:4]]
        for problem in asked  # the first shape is the largest
    ]
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        write_run(folder, steps=1, groups=GROUPS, generations=4, typed=("reward=[iou]", "task.eval.reward=iou"))
    names = show_images(
        folder,
        GROUPS,
        prompt=[problem.question for problem in asked for _ in range(4)],
        completion=[str(box) for of_problem in boxes for box in (of_problem * 2)[:4]],
        answer=[str(of_problem[0]) for of_problem in boxes for _ in range(4)],
        iou=[float(place == 0) for _ in asked for place in range(4)],
        advantage=[1.5, -0.5, -0.5, -0.5],
        image_sizes=[[[96, 96]]],
        shown_sizes=[[[96, 96]]],
    )
    for name, problem in zip(names, asked, strict=True):
        shapes.picture(problem).save(folder / "completions" / "images" / name, quality=95)
    return folder


def take_all(asked: dict[str, Any], to: Path) -> None:
    """Take the pictures of directories by their kinds, into the folder `to`."""
    compared = asked.pop("compare", None)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for kind, folder in asked.items():
            file = folder / PAGE if kind == "preflight" else write_report(folder)
            take = take_tops if kind in TOPS else take_problem if kind == "problems" else take_completions
            take(browser, file.resolve().as_uri(), kind, to)
        if compared:
            with tempfile.TemporaryDirectory() as folder:
                take_tops(browser, write_comparison(named(compared), Path(folder)).as_uri(), "comparison", to)
        browser.close()


def take_tops(browser: Browser, address: str, kind: str, to: Path) -> None:
    """Take pictures of the top of a page, light and dark on a desktop, and on a phone."""
    for size, options in SIZES.items():
        with browser.new_context(**options) as context:
            page = context.new_page()
            page.goto(address)
            page.locator("body[data-drawn]").wait_for()
            height = page.evaluate("document.documentElement.getBoundingClientRect().height")
            clip = {"x": 0, "y": 0, **options["viewport"], "height": min(height, options["viewport"]["height"])}
            save(page, clip, to / f"{kind}_{size}.png")


def take_completions(browser: Browser, address: str, kind: str, to: Path) -> None:
    """Take a picture of the groups of completions whose rewards differ most, with what is above them."""
    page = browser.new_page(viewport={"width": 1000, "height": 6000}, color_scheme="light")
    page.goto(address)
    page.locator("body[data-drawn]").wait_for()
    page.locator("#all").check()
    page.locator("#order").select_option("difference")
    if kind == "tokens":
        page.locator("#only").select_option("values")
        page.locator("#overlay").select_option("advantage")
        page.locator(".tokens span").nth(3).click()
    top, bottom = page.evaluate(
        """last => [document.getElementById("browse").getBoundingClientRect().top,
                    document.querySelectorAll(".group")[last].getBoundingClientRect().bottom]""",
        GROUPS - 1,
    )
    save(page, {"x": 0, "y": top, "width": 1000, "height": bottom + 10 - top}, to / f"page_{kind}.png")


def take_problem(browser: Browser, address: str, kind: str, to: Path) -> None:
    """Take a picture of the first problems in the table, and of the first of them through the steps."""
    page = browser.new_page(viewport={"width": 1000, "height": 9000}, color_scheme="light")
    page.goto(address)
    page.locator("body[data-drawn]").wait_for()
    page.locator("#problems a").first.click()
    page.evaluate("[...document.querySelectorAll('#problems tr')].slice(8).forEach((row) => { row.hidden = true; })")
    top, bottom = page.evaluate(
        """last => [document.getElementById("by-problem").getBoundingClientRect().top,
                    [...document.querySelectorAll("#followed .group")].slice(0, last).at(-1)
                      .getBoundingClientRect().bottom]""",
        GROUPS + 1,
    )
    save(page, {"x": 0, "y": top, "width": 1000, "height": bottom + 10 - top}, to / f"page_{kind}.png")


def save(page: Page, clip: Any, file: Path) -> None:
    """Save a part of a page as a picture of few colours."""
    taken = Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB")
    taken.quantize(256, Image.Quantize.MAXCOVERAGE).save(file, optimize=True)


if __name__ == "__main__":
    main()
