"""Comparisons of runs and sweeps in headless Chromium."""

import json

import pytest

from grpo.reporting.page import named, write_comparison, write_report
from grpo.rundir.sweep_dir import SWEEP
from tests.e2e.conftest import DESKTOP, PHONE, fits, problems_of_access
from tests.page_fixtures import HOSTILE, write_run
from tests.unit.reporting.test_comparison import evaluated

pytestmark = pytest.mark.slow


@pytest.fixture
def runs(composed, tmp_path):
    folders = [
        write_run(tmp_path / "sweep" / str(job), 20, 2, 4, typed=(f"train.seed={job}",), text=HOSTILE[0])
        for job in (3, 4)
    ]
    evaluated(folders[0], [True] * 20 + [False] * 30, prompt=HOSTILE[1] + " {}")
    evaluated(folders[1], [True] * 40 + [False] * 10, prompt=HOSTILE[1] + " {}")
    return folders


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_comparison_is_readable_by_everyone(size, scheme, runs, tmp_path, opened):
    file = write_comparison(named(runs), tmp_path)
    page = opened(file, size, color_scheme=scheme)
    assert fits(page)
    assert page.noted == [file.resolve().as_uri()]
    assert page.locator(".chart svg").count() == page.locator("figcaption").count() > 5
    assert page.locator(".legend").first.inner_text().split() == ["sweep/3", "sweep/4"]
    assert problems_of_access(page) == []


def test_answers_to_a_problem_are_side_by_side(runs, tmp_path, opened):
    page = opened(write_comparison(named(runs), tmp_path))
    groups = page.locator("#answers .group")
    assert groups.count() == 20
    assert groups.first.locator("h4").all_inner_texts() == ["sweep/3: incorrect", "sweep/4: correct"]
    page.locator("#more-answers").click()
    assert groups.count() == 40
    page.locator("#which").select_option("differ")
    assert page.locator("#number-of-answers").inner_text() == "20 of 50 problems"
    page.locator("#which").select_option("0")
    assert page.locator("#number-of-answers").inner_text() == "0 of 50 problems"
    page.locator("#which").select_option("1")
    assert groups.count() == 20
    page.locator("#find-answer").fill(" 33")
    assert page.locator("#number-of-answers").inner_text() == "1 of 50 problems"
    assert page.title().startswith("GRPO runs")


def test_a_sweep_compares_its_jobs(runs, tmp_path, opened):
    (tmp_path / "sweep" / SWEEP).write_text(json.dumps({"overrides": [], "comparison": None, "swept": ["train.seed"]}))
    page = opened(write_report(tmp_path / "sweep"))
    assert {"Accuracy", "Reward"} <= set(page.locator("figcaption").all_inner_texts())
    text = page.locator("main").inner_text()
    assert "The accuracy of seed=3 is 40.0 points lower than that of seed=4, on the same 50 problems" in text
    assert page.locator("#answers .group").count() == 20
    page.locator("#log").check()
    page.locator("#smoothing").fill("0.5")
    assert len(page.noted) == 1
    assert problems_of_access(page) == []
