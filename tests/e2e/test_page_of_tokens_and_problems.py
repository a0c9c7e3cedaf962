"""Tokens and problems on the page of a run, in headless Chromium."""

import pytest
from pyarrow import parquet

from grpo.reporting.page import write_report
from tests.e2e.conftest import DESKTOP, PHONE, fits, problems_of_access
from tests.page_fixtures import HOSTILE, show_tokens, write_run

pytestmark = pytest.mark.slow
STEPS = 12


@pytest.fixture(scope="module")
def run(composed, tmp_path_factory):
    """A run that asks each problem at each step, with values per token."""
    folder = write_run(tmp_path_factory.mktemp("tokens") / "run", steps=STEPS, groups=3, generations=4)
    show_tokens(folder)
    return write_report(folder)


def follow(page, problem: int) -> None:
    """Click on a problem of the table, and wait for its completions: a browser follows a fragment after the click."""
    page.locator("#problems a").nth(problem).click()
    page.locator("#followed .group").first.wait_for()


def background(span) -> str:
    return span.evaluate("element => getComputedStyle(element).backgroundColor")


def test_tokens_are_coloured_by_one_value_at_a_time(run, opened):
    page = opened(run)
    assert page.locator(".tokens").count() == 0
    names = page.locator("#overlay option").all_inner_texts()
    assert names == [
        "nothing",
        "log-probability",
        "entropy",
        "advantage",
        "importance ratio",
        "clipped",
        "outside the loss",
    ]
    page.locator("#overlay").select_option("logp")
    tokens = page.locator(".tokens").first.locator("span")
    assert tokens.all_inner_texts() == ["The", " answer", " ", " 4", " 2", "<eos>"]
    colours = [background(span) for span in tokens.all()]
    assert len(set(colours)) >= 5
    alphas = [float(colour.rpartition("/")[2].rstrip(")")) for colour in colours]
    assert alphas.index(max(alphas)) == 4  # the least likely one
    assert page.locator("#scale").inner_text().split("\n")[-1].strip().endswith("-4 or less")
    page.locator("#overlay").select_option("clipped")
    assert [span.inner_text() for span in page.locator(".tokens").first.locator(".marked").all()] == [" answer"]
    page.locator("#overlay").select_option("kind")
    assert background(tokens.nth(2)) != background(tokens.nth(3)) != background(tokens.nth(0))
    page.locator("#overlay").select_option("")
    assert page.locator(".tokens").count() == 0
    assert page.noted == [run.resolve().as_uri()]


def test_a_token_says_its_values_by_pointer_and_by_keys(run, opened):
    page = opened(run)
    page.keyboard.press("t")
    assert page.locator("#overlay").input_value() == "logp"
    first = page.locator(".tokens").first
    said = page.locator(".tokens + p").first
    first.locator("span").nth(1).hover()
    for part in ('" answer"', "log-probability -2.5", "entropy 2", "importance ratio 1.3, clipped, in"):
        assert part in said.inner_text()
    first.focus()
    page.keyboard.press("ArrowRight")
    assert "outside the loss (tool)" in said.inner_text()
    page.keyboard.press("ArrowLeft")
    assert '" answer"' in said.inner_text()
    page.locator("h1").click()
    page.keyboard.press("t")
    assert page.locator("#overlay").input_value() == "entropy"


def test_tokens_are_coloured_one_click_away(run, opened):
    page = opened(run)
    page.locator(".group").nth(1).locator("summary").click()
    button = page.locator(".group").nth(1).get_by_role("button", name="colour tokens").first
    button.scroll_into_view_if_needed()
    before = page.locator(".group").nth(1).bounding_box()["y"]
    button.click()
    assert page.locator("#overlay").input_value() == "logp"
    assert page.locator(".group").nth(1).locator(".tokens").count() > 0
    assert page.locator(".group").nth(1).locator("details[open]").count() == 1, "opened as before"
    assert abs(page.locator(".group").nth(1).bounding_box()["y"] - before) < 2, "where it was"
    page.get_by_role("button", name="plain text").first.click()
    assert page.locator(".tokens").count() == 0


def test_equal_completions_with_values_are_counted(composed, tmp_path, opened):
    folder = write_run(tmp_path / "run", steps=1, groups=1, generations=12)
    show_tokens(folder)
    file = folder / "completions" / "completions_00001.parquet"
    table = parquet.read_table(file).drop_columns(["completion", "correctness"])
    parquet.write_table(
        table.append_column("completion", [["4"] * 12]).append_column("correctness", [[1.0] * 12]), file
    )
    page = opened(write_report(folder))
    assert "12 equal" in page.locator(".group h4").inner_text()
    page.locator("#only").select_option("values")
    assert page.locator("#count").inner_text() == "8 found; 12 completions"


def test_completions_with_values_can_be_chosen(run, opened):
    page = opened(run)
    page.locator("#only").select_option("values")
    assert page.locator("#count").inner_text().startswith("8 found")


@pytest.mark.parametrize("text", [*HOSTILE[:4], HOSTILE[5], HOSTILE[7]])
def test_a_token_of_a_hostile_model_is_text(text, composed, tmp_path, opened):
    folder = write_run(tmp_path / "run", steps=2, groups=1, generations=2, text=text)
    show_tokens(folder, text)
    file = write_report(folder)
    page = opened(file, PHONE)
    page.locator("#overlay").select_option("logp")
    follow(page, 0)
    assert page.locator(".tokens img, .tokens script, #followed img, #followed script, #problems script").count() == 0
    assert page.title().startswith("GRPO run")
    assert page.locator("h1").count() == 1
    assert page.noted == [file.resolve().as_uri()]
    assert fits(page)


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_problem_is_followed_through_the_steps(size, run, opened):
    page = opened(run, size)
    rows = page.locator("#problems tr")
    assert rows.count() == 3
    assert rows.first.locator("td").all_inner_texts()[1::2] == [str(STEPS), "50%", ""]
    assert rows.first.locator("circle").count() == STEPS
    follow(page, 1)
    assert page.url.endswith("#problem=2")
    assert page.locator("#followed .group").count() == STEPS
    assert "step 1: accuracy 50%, 4 completions" in page.locator("#followed .group").first.inner_text()
    assert page.locator("#followed .completion").count() == 2 * STEPS
    assert fits(page)
    page.locator("#followed .completion a").first.click()
    page.locator(".completion.named").first.wait_for()
    assert page.locator(".completion.named").count() == 1
    assert "answer 7" in page.locator(".completion.named").inner_text()
    page.go_back()
    page.locator("#following").wait_for()


def test_problems_are_searched_and_sorted(run, opened):
    page = opened(run)
    page.locator("#find").fill("question 2")
    assert page.locator("#problems tr").count() == 1
    page.locator("#find").fill("")
    sort = page.locator("th:has(button[data-key='last'])")
    assert sort.get_attribute("aria-sort") == "none"
    sort.locator("button").click()
    assert sort.get_attribute("aria-sort") == "descending"
    sort.locator("button").click()
    assert sort.get_attribute("aria-sort") == "ascending"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everyone_can_read_and_use_the_page(scheme, run, opened):
    page = opened(run, color_scheme=scheme)
    page.locator("#overlay").select_option("logp")
    follow(page, 0)
    assert problems_of_access(page) == []


def test_a_long_run_makes_a_small_page(composed, tmp_path, opened):
    text = "First 3 and 4 are 7, then half of that is " + "3.5 apples and so on " * 15
    folder = write_run(tmp_path / "run", steps=1000, groups=16, generations=8, text=text)
    show_tokens(folder, text)
    file = write_report(folder)
    assert file.stat().st_size <= 4_000_000
    page = opened(file)
    assert page.locator(".group").count() > 0
    assert page.locator("#problems tr").count() == 16
    assert page.noted == [file.resolve().as_uri()]
