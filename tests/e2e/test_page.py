"""The page in headless Chromium, Debian's package: text of a model neither runs in it nor breaks it."""

import json
import re

import pytest
from pyarrow import parquet

from grpo.reporting.page import write_report
from grpo.rundir.sweep_dir import SWEEP
from tests.e2e.conftest import DESKTOP, PHONE, fits
from tests.page_fixtures import HOSTILE, show_images, write_run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_page_is_readable_on_phone_and_desktop_light_and_dark(size, scheme, composed, tmp_path, opened):
    file = write_report(write_run(tmp_path / "run", steps=30, groups=2, generations=4))
    page = opened(file, size, color_scheme=scheme)
    assert fits(page)
    assert page.noted == [file.resolve().as_uri()]
    light, dark = "rgb(255, 255, 255)", "rgb(17, 21, 26)"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == {"light": light, "dark": dark}[scheme]
    assert page.locator(".chart svg").count() == page.locator("figcaption").count() == 10
    assert page.locator(".tiles li").count() == page.locator(".tiles .spark").count() == 6
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


def test_a_script_that_got_into_the_page_would_not_run(composed, tmp_path, opened):
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
    assert [text.split(", advantage")[0] for text in pair.all_text_contents()] == [
        "best: correct, reward 1",
        "worst: incorrect, reward 0",
    ]
    page.locator("#search").fill("ANSWER 3")
    assert page.locator("#count").text_content() == "1 found; 8 completions"
    page.locator("#search").fill("")
    page.locator("#only").select_option("incorrect")
    assert page.locator("#count").text_content() == "4 found; 8 completions"
    page.locator("#only").select_option("all")
    page.locator("summary").first.click()
    between = page.locator(".group").first.locator("details .completion")
    between.nth(1).wait_for()
    assert between.count() == 2
    page.locator("#order").select_option("lowest")
    assert page.locator(".completion h4").first.text_content().startswith("incorrect, reward 0,")
    page.locator("#order").select_option("highest")
    assert page.locator(".completion h4").first.text_content().startswith("correct, reward 1,")
    page.locator("#all").check()
    assert page.locator("#count").text_content() == "24 completions"
    assert page.locator(".group").count() == 20
    page.locator("#more").click()
    assert page.locator(".group").count() == 24


def test_without_a_grader_no_completion_is_called_correct(composed, tmp_path, opened):
    run = write_run(tmp_path / "run", steps=1, groups=2, generations=4)
    for file in (run / "completions").glob("*.parquet"):
        parquet.write_table(parquet.read_table(file).drop_columns("correctness"), file)
    page = opened(write_report(run))
    assert page.locator("#count").text_content() == "8 completions"
    assert page.locator("#only option").count() == len(
        ["all", "positive", "negative", "truncated", "unscored", "tools"]
    )


def test_a_link_leads_to_a_completion_which_can_be_compared(composed, tmp_path, opened):
    file = write_report(write_run(tmp_path / "run", steps=3, groups=2, generations=4))
    page = opened(file, link="#step=2&row=6")
    assert page.locator("#number").text_content() == "2"
    named = page.locator(".completion.named")
    assert named.locator("pre").text_content().strip() == "answer 6"
    named.get_by_role("button").click()
    page.locator("#completions .group").first.get_by_role("button").first.click()
    assert page.locator("#compared .completion").count() == 2
    page.locator("#separate").click()
    assert not page.locator("#compare").is_visible()


def test_the_keyboard_alone_reads_completions(composed, tmp_path, opened):
    page = opened(write_report(write_run(tmp_path / "run", steps=1, groups=3, generations=2)))
    for key, place in (("j", 0), ("j", 1), ("j", 2), ("j", 2), ("k", 1)):
        page.keyboard.press(key)
        card = "[...document.querySelectorAll('#completions > .group')].indexOf(document.activeElement)"
        assert page.evaluate(card) == place
    page.keyboard.press("?")
    assert page.locator("#help").is_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("jk 1")
    assert page.locator("#search").input_value() == "jk 1"


def test_charts_show_values_zoom_alike_and_lead_to_a_step(composed, tmp_path, opened):
    page = opened(write_report(write_run(tmp_path / "run", steps=60, groups=1, generations=2)))
    charts = page.locator(".chart svg")
    box = charts.nth(1).bounding_box()
    middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.move(*middle)
    tooltip = page.locator("#vg-tooltip-element")
    tooltip.get_by_text("reward: ").wait_for()
    step = int(tooltip.text_content().split("step ")[1].split(",")[0])
    page.mouse.click(*middle)
    page.wait_for_url(f"**#step={step}")
    page.locator(f"#number:text-is('{step}')").wait_for()  # a browser follows a fragment after the click

    charts.nth(1).scroll_into_view_if_needed()
    box = charts.nth(1).bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, box["y"] + 60, steps=5)
    page.mouse.up()
    page.locator("#whole").wait_for()
    axis = page.locator(".chart").nth(2).locator(".role-axis-label").first
    axis.get_by_text("0", exact=True).wait_for(state="detached")
    steps = [int(text) for text in axis.locator("text").all_text_contents()]
    assert 20 <= min(steps) < max(steps) <= 55
    page.locator("#whole").click()
    assert not page.locator("#whole").is_visible()
    page.locator("#smoothing").fill("0.9")
    page.locator("#log").check()
    assert [message for message in page.noted if "rror" in message] == []


def test_a_bar_of_sections_stays_and_leads_to_them(composed, tmp_path, opened):
    page = opened(write_report(write_run(tmp_path / "run", steps=30, groups=2, generations=4)))
    bar = page.get_by_role("navigation", name="sections")
    names = ["Findings", "Charts", "Completions", "Problems", "Settings", "Memory"]
    assert bar.locator("a").all_inner_texts() == names
    for name in ("Settings", "Charts"):
        bar.get_by_text(name, exact=True).click()
        bar.locator("a[aria-current=true]").get_by_text(name, exact=True).wait_for()
        heading = page.locator("main > h2", has_text=name).bounding_box()
        assert bar.bounding_box()["y"] == 0
        assert bar.bounding_box()["height"] <= heading["y"] < 900
    assert page.locator("h1").inner_text() == "tiny"
    assert page.locator(".about").inner_text().split("\n")[0].startswith("completed 30 steps 60 s")


def test_charts_over_minutes_in_line_smoothed_with_units(composed, tmp_path, opened):
    page = opened(write_report(write_run(tmp_path / "run", steps=60, groups=1, generations=2)))
    assert page.locator("#smoothing").input_value() == "0.6"
    assert page.locator("#constants").inner_text() == "Constant: learning rate 0.0003."
    assert "Learning rate" not in page.locator("figcaption").all_inner_texts()
    frames = [rect.bounding_box() for rect in page.locator(".chart svg .mark-group.role-frame > g > .background").all()]
    assert len({(box["x"], box["width"]) for box in frames}) == 3, "a place per column"
    chart = page.locator("figure", has_text="Completion length").locator("svg")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    tooltip = page.locator("#vg-tooltip-element.visible")
    tooltip.get_by_text("tokens").wait_for()
    where, value, smoothed = tooltip.inner_text().split("\n")
    assert re.fullmatch(r"step \d+, 0\.\d+ minutes, [\d,]+ tokens", where)
    assert re.fullmatch(r"(mean|min|max): [\d.]+ tokens", value)
    assert smoothed.startswith("smoothed: ")
    page.locator("#axis").select_option("minutes")
    titles = page.locator(".chart .role-axis-title text")
    page.locator(".chart").last.get_by_text("minutes", exact=True).wait_for()
    assert set(titles.all_text_contents()) == {"minutes"}
    labels = page.locator(".chart").first.locator(".role-axis-label").first.locator("text").all_text_contents()
    assert 0.3 <= float(labels[-1]) <= 0.4, "60 steps of 0.4 s"


def test_any_metric_is_a_chart_until_it_is_removed(composed, tmp_path, opened):
    page = opened(write_report(write_run(tmp_path / "run", steps=20, groups=1, generations=2)))
    count = page.locator(".chart svg").count()
    for name in ("num_tokens", "reward_std"):
        page.locator("#metric").select_option(name)
        page.locator("figure", has_text=name).locator("svg").wait_for()
    assert page.locator("#metric").input_value() == ""
    assert page.locator("figcaption").first.inner_text() == "reward_std remove"
    page.locator("#log").check()
    page.locator("#smoothing").fill("0")
    page.locator("figcaption button").first.click()
    assert page.locator(".chart svg").count() == count + 1
    assert [message for message in page.noted if "rror" in message] == []


def test_equal_completions_are_shown_once_with_the_answer(composed, tmp_path, opened):
    folder = write_run(tmp_path / "run", steps=200, groups=2, generations=6)
    for file in (folder / "completions").iterdir():
        table = parquet.read_table(file)
        texts = [f"#### {row % 3}" for row in range(len(table))]
        rewards = [float(row % 3 == 0) for row in range(len(table))]
        table = table.drop_columns(["completion", "correctness"])
        parquet.write_table(table.append_column("completion", [texts]).append_column("correctness", [rewards]), file)
    page = opened(write_report(folder), link="#step=100&row=4")
    shown = int(page.locator("#number").inner_text())
    assert shown != 100
    nearest = page.locator("#nearest")
    assert nearest.inner_text() == f"No completions of step 100 are on this page; step {shown} is the nearest."
    first, second = page.locator(".group").all()
    assert "reference answer: 0" in first.inner_text()
    assert "reference answer: 1" in second.inner_text()
    assert first.locator(".pair h4").first.inner_text().startswith("best: correct, 2 equal, reward 1")
    assert first.locator("summary").inner_text() == "2 more"
    assert page.locator("#count").inner_text() == "12 completions"
    page.evaluate(f"location.hash = 'step={shown}&row=4'")
    page.locator(".completion.named").wait_for()
    assert page.locator(".completion.named pre").inner_text() == "#### 1", "row 4 is shown with row 1"
    assert nearest.inner_text() == ""
    borders = [first.locator(f".completion.{grade}").first for grade in ("correct", "incorrect")]
    colours = [border.evaluate("one => getComputedStyle(one).borderLeftColor") for border in borders]
    assert colours == ["rgb(26, 127, 55)", "rgb(179, 38, 30)"]
    page.locator("#only").select_option("correct")
    assert page.locator("#count").inner_text() == "4 found; 12 completions"
    assert page.locator(".group").count() == 2


def test_a_phone_offers_no_keys_and_no_drags(composed, tmp_path, opened):
    file = write_report(write_run(tmp_path / "run", steps=10, groups=2, generations=4))
    for touch in (True, False):
        page = opened(file, PHONE, has_touch=touch, is_mobile=touch)
        text = page.locator("main").inner_text()
        assert ("Drag over a chart" in text) is ("keys:" in text) is not touch
        assert ("Tap a step" in text) is touch
        page.context.close()
    page = opened(file, PHONE, has_touch=True, is_mobile=True)
    chart = page.locator(".chart svg").nth(1)
    chart.scroll_into_view_if_needed()
    chart.tap()
    page.wait_for_url("**#step=*")
    assert fits(page)
    assert page.noted[1:] == []


def test_ten_thousand_steps_make_a_small_page(composed, tmp_path, opened):
    folder = write_run(tmp_path / "run", steps=10_000, groups=2, generations=5, text="a sentence of some length " * 8)
    file = write_report(folder)
    assert file.stat().st_size < 5_000_000
    page = opened(file)
    assert page.locator(".group").count() == 2
    assert page.noted == [file.resolve().as_uri()]


def test_the_page_of_a_sweep_leads_to_its_jobs(composed, tmp_path, opened):
    for number in range(3):
        typed = (f"train.num_generations={2**number * 2}",)
        write_report(write_run(tmp_path / str(number), steps=3, groups=1, generations=2, typed=typed))
    (tmp_path / SWEEP).write_text(json.dumps({"overrides": [], "comparison": None}))
    page = opened(write_report(tmp_path), PHONE)
    assert fits(page)
    assert page.locator("table tr").count() == 4
    assert page.locator(".charts").first.locator("svg").count() == 2
    page.locator("table a").nth(1).click()
    page.wait_for_url("**/1/report.html")
    assert page.title().endswith("/1")
    assert "train.num_generations=4" in page.locator("pre.command").text_content()


def test_a_page_prints_completely(composed, tmp_path, opened):
    page = opened(write_report(write_run(tmp_path / "run", steps=3, groups=2, generations=4)))
    page.emulate_media(media="print")
    assert page.locator(".controls:visible").count() == 0
    assert page.locator(".group").first.is_visible()
    assert page.pdf()[:5] == b"%PDF-"


SIZES = {"image_sizes": [[[200, 100]]], "shown_sizes": [[[100, 50]]], "answer": ["[20, 10, 120, 60]"]}


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_each_prompt_has_its_images_and_the_page_loads_nothing(size, composed, tmp_path, opened):
    folder = write_run(tmp_path / "run", steps=2, groups=2, generations=4)
    names = show_images(folder, 3, per_prompt=2)
    (folder / "completions" / "images" / names[2]).unlink()
    file = write_report(folder)
    page = opened(file, size)
    assert fits(page)
    assert [url for url in page.noted if not url.startswith("data:image/jpeg;base64,")] == [file.resolve().as_uri()]
    page.locator("#step").fill("0")
    first, second = page.locator(".group").all()
    assert [each.get_attribute("alt") for each in first.locator("img").all()] == ["image 1 of 2", "image 2 of 2"]
    assert second.locator("img").count() == 1
    assert second.locator(".pictures p").text_content() == "image 1 of 2: not on this page"
    assert page.evaluate("[...document.images].every((one) => one.naturalWidth === 160)")
    picture, answer = first.locator(".pictures").bounding_box(), first.locator(".completion").first.bounding_box()
    if size is DESKTOP:
        assert picture["x"] + picture["width"] < answer["x"]
    else:
        assert picture["y"] + picture["height"] < answer["y"]
    page.locator("#order").select_option("lowest")
    assert page.locator(".group").first.locator("img").count() == 2


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_boxes_are_drawn_where_they_are_in_the_image(size, composed, tmp_path, opened):
    folder = write_run(tmp_path / "run", steps=1, groups=1, generations=4, typed=("+reward=iou",))
    written = ["[100, 50, 200, 100]", "[0, 0, 1e308, 1e308] [NaN, 0, 1, 1]", "</script><rect x='1'>", "[1,2,3,4]" * 100]
    show_images(folder, 1, completion=written, **SIZES)
    page = opened(write_report(folder), size)
    page.locator("summary").click()
    page.locator(".completion").nth(3).wait_for()
    assert fits(page)
    for text, drawn, caption in (
        (written[0], [(0.5, 0.5, 1, 1)], "1 box"),
        (written[1], [(0, 0, 1, 1)], "1 box"),
        (written[2], [], "0 boxes"),
        (written[3], None, "100 boxes, 50 drawn"),
    ):
        block = page.locator(".completion", has=page.get_by_text(text, exact=True))
        assert block.locator("p").text_content() == caption
        assert block.locator("img").get_attribute("alt") == f"image 1 with {caption} of the completion and 1 correct"
        image = block.locator("img").bounding_box()
        parts = [in_parts(rect.bounding_box(), image) for rect in block.locator("rect.named").all()]
        assert len(parts) == 50 if drawn is None else parts == [pytest.approx(box, abs=0.03) for box in drawn]
        (correct,) = block.locator("rect.correct").all()
        assert in_parts(correct.bounding_box(), image) == pytest.approx((0.1, 0.1, 0.6, 0.6), abs=0.03)
    page.set_viewport_size({"width": 220, "height": 800})
    image, block = (page.locator(name).first.bounding_box() for name in (".completion img", ".completion"))
    assert image["x"] + image["width"] <= block["x"] + block["width"]
    assert image["width"] / image["height"] == pytest.approx(160 / 120, rel=0.02)
    assert "correct boxes, dashed" in page.locator(".legend").last.text_content()


def in_parts(box: dict, image: dict) -> tuple:
    """Left, upper, right and lower edge of what is drawn, as parts of the image."""
    left, upper = (box["x"] - image["x"]) / image["width"], (box["y"] - image["y"]) / image["height"]
    return left, upper, left + box["width"] / image["width"], upper + box["height"] / image["height"]


@pytest.mark.parametrize("text", HOSTILE)
def test_text_beside_an_image_neither_runs_nor_breaks_the_page(text, composed, tmp_path, opened):
    folder = write_run(tmp_path / "run", steps=1, groups=1, generations=2, text=text)
    show_images(folder, 1, **SIZES)
    page = opened(write_report(folder), PHONE)
    assert page.title().startswith("GRPO run")
    assert page.locator(".group script, .group style, .group h1").count() == 0
    assert page.locator(".group img").count() == 3
    assert page.evaluate("[...document.images].every((one) => one.src.startsWith('data:image/jpeg;base64,'))")
    assert fits(page)
