"""The pages of runs and sweeps, as text; `tests/e2e/test_page.py` looks at them in a browser."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas
import pytest
import yaml
from hydra import compose
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from grpo.config.schema import ROOT
from grpo.reporting.charts import accuracy_by_value, bars
from grpo.reporting.completions import MAX_LENGTH, MAX_SIZE, as_data, said, sample, shortened
from grpo.reporting.curves import MAX_POINTS, Curve, axes_of, constants, mean_of, thinned
from grpo.reporting.page import write_report
from grpo.reporting.render import SCRIPTS
from grpo.reporting.sweep import accuracies_of, groups_of
from grpo.reporting.text import line
from grpo.reporting.vega import javascript
from grpo.rundir.run_dir import read_run
from grpo.rundir.sweep_dir import SWEEP, read_sweep
from grpo.sweeps.callback import print_sweep
from grpo.utils.errors import ConfigError
from tests.page_fixtures import HOSTILE, write_run

RUN = {"steps": 4, "groups": 2, "generations": 4}


def page_of(folder: Path) -> str:
    return write_report(folder).read_text()


@pytest.fixture(scope="module")
def page(composed, tmp_path_factory) -> str:
    """The page of a run that several tests look at."""
    return page_of(write_run(tmp_path_factory.mktemp("page") / "run", **RUN))


class Links(HTMLParser):
    """Collects what a page would load or lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found += [str(value) for name, value in attributes if name in ("src", "href", "xlink:href", "action")]
        assert not any(name.startswith("on") for name, _ in attributes)


def data_of(page: str, name: str = "data") -> Any:
    return json.loads(re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page, re.S)[1])


def test_the_page_says_what_was_trained_how_and_with_what_result(page):
    for text in (
        "grpo.builtin.tasks.arithmetic.rows",
        "correctness × 1",
        "groups of 8",
        "adamw",
        "11.0%",
        "95.0%",
        "0.65",
    ):
        assert text in page
    assert "python -m grpo.train train.seed=3" in page
    assert "Advice" not in page


def test_the_page_loads_nothing_and_leads_nowhere(page):
    links = Links()
    links.feed(page)
    assert all(link.startswith("#") for link in links.found)


def test_every_curve_has_its_picture(page):
    titles = re.findall(r'<figcaption title=".+">(.*?)</figcaption>', page)
    assert titles[:4] == ["Accuracy", "Reward", "Completion length, tokens", "Entropy, nats per token"]
    assert {"Zero-variance groups", "Truncated completions", "Gradient norm"} <= set(titles)
    assert {"Time by phase, s/step", "Memory by phase, GiB", "Skipped completions (zero advantage)"} <= set(titles)
    assert [chart["title"] for chart in data_of(page, "charts")] == titles
    assert all(chart["about"] for chart in data_of(page, "charts"))


def test_each_of_several_reward_functions_has_its_curve(composed, tmp_path):
    folder = write_run(tmp_path / "run", typed=("+reward=[format,brevity]",), **RUN)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    added = {"rewards/format/mean": 0.5, "rewards/brevity/mean": 0.25}
    (folder / "metrics.jsonl").write_text("".join(json.dumps({**row, **added}) + "\n" for row in rows))
    page = page_of(folder)
    (chart,) = (chart for chart in data_of(page, "charts") if chart["title"] == "Reward functions")
    assert list(chart["lines"]) == chart["labels"] == ["correctness", "format", "brevity"]


def test_a_page_without_what_a_run_did_not_come_to(composed, tmp_path):
    folder = write_run(tmp_path / "run", **RUN)
    for name in ("metrics.jsonl", "evaluation.json", "plan.json", "summary.json"):
        (folder / name).unlink()
    for file in (folder / "completions").iterdir():
        file.unlink()
    page = page_of(folder)
    assert "still running, or killed without a summary" in page
    assert "No step was logged." in page
    assert "No step was completed." in page


def test_an_incomplete_line_does_not_lose_the_others(composed, tmp_path):
    folder = write_run(tmp_path / "run", **RUN)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rewa')
    assert "in 4 logged steps" in page_of(folder)


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_model_wrote_is_no_markup(text, composed, tmp_path):
    page = page_of(write_run(tmp_path / "run", text=text, **RUN))
    own = page.replace(javascript(), "")
    assert own.lower().count("<script") == own.lower().count("</script") == len(SCRIPTS) + 7
    assert own.lower().count("<style") == own.lower().count("</style") == 1
    first = data_of(page)["steps"][0]["groups"][0]
    readable = text[:100].encode("utf-16", "surrogatepass").decode("utf-16", "replace").replace("\ufffd", "")
    for shown in (first["prompt"], *(row["text"] for row in first["completions"])):
        assert readable in shown.replace("\ufffd", "")


@given(st.text())
def test_data_in_a_page_is_data_and_comes_back_as_it_was(text):
    written = as_data({"text": text})
    assert not re.search("[<>&]", written)
    assert json.loads(written) == {"text": text}


@given(st.text(st.characters(), max_size=50))
def test_a_text_that_is_shown_can_be_written(text):
    shown = shortened(text)
    assert shown.encode().decode() == shown
    assert shown == text or any(0xD800 <= ord(letter) < 0xE000 for letter in text)


def test_a_long_text_keeps_its_beginning_and_its_end():
    shown = shortened("a" * 2_000_000 + "end")
    assert len(shown) < MAX_LENGTH + 100
    assert shown.startswith("aaa")
    assert shown.endswith("end")
    assert "1994003 characters omitted" in shown


def test_a_conversation_is_shown_as_who_said_what():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 x 7?"}]
    assert shortened(messages) == "system: Be brief.\nuser: 6 x 7?"
    assert shortened([{"role": "assistant", "content": "42"}]) == "42"


def test_a_conversation_with_tools_is_shown_turn_by_turn():
    call = {"function": {"name": "add", "arguments": json.dumps({"a": 1, "b": "</script>"})}}
    asks = {"role": "assistant", "content": "Let me see.", "tool_calls": [call], "name": None}
    result = {"role": "tool", "content": "3", "tool_calls": None, "name": "add"}
    answer = {"role": "assistant", "content": "#### 3", "tool_calls": None, "name": None}
    turns = said([asks, result, answer])["turns"]
    assert [turn["who"] for turn in turns] == ["policy", "call", "tool", "policy"]
    assert [turn["text"] for turn in turns] == ["Let me see.", "add(a=1, b='</script>')", "3", "#### 3"]
    assert said([answer]) == {"text": "#### 3"}


def test_completions_are_grouped_with_the_highest_reward_first(tmp_path):
    rows = {"step": [1] * 4, "prompt": ["a", "a", "b", "b"], "completion": list("wxyz"), "advantage": [0.0] * 4}
    (tmp_path / "completions").mkdir()
    rewards = pandas.DataFrame({**rows, "correct": [0.0, 1.0, None, 0.0], "brief": [0.5, 0.0, None, 1.0]})
    rewards.to_parquet(tmp_path / "completions" / "completions_00001.parquet")
    found = sample(tmp_path, {"correct": 1.0, "brief": 0.1}, "correctness")
    (step,) = found["steps"]
    assert [[(row["text"], row["reward"]) for row in group["completions"]] for group in step["groups"]] == [
        [("x", 1.0), ("w", 0.05)],
        [("z", 0.1), ("y", None)],
    ]


def test_a_long_run_is_shown_by_steps_from_beginning_to_end(composed, tmp_path):
    folder = write_run(tmp_path / "run", steps=200, groups=1, generations=2)
    found = sample(folder, {"correctness": 1.0}, "correctness")
    numbers = [step["step"] for step in found["steps"]]
    assert (numbers[0], numbers[-1], found["shown"], found["logged"]) == (1, 200, 60, 200)


def test_completions_that_a_killed_run_wrote_in_part_are_skipped(composed, tmp_path):
    folder = write_run(tmp_path / "run", **RUN)
    file = folder / "completions" / "completions_00004.parquet"
    file.write_bytes(file.read_bytes()[:100])
    assert [step["step"] for step in sample(folder, {"correctness": 1.0}, "correctness")["steps"]] == [1, 2, 3]


def test_the_command_of_a_run_has_its_folder_of_configurations(composed, tmp_path):
    folder = write_run(tmp_path / "run", **RUN)
    sources = [{"path": "/my conf", "provider": "command-line"}, {"path": "grpo.conf", "provider": "main"}]
    (folder / ".hydra" / "hydra.yaml").write_text(
        json.dumps({"hydra": {"runtime": {"config_sources": sources}, "job": {"config_name": "mine"}}})
    )
    assert "python -m grpo.train &#39;--config-dir=/my conf&#39; --config-name=mine train.seed=3" in page_of(folder)


def test_truncated_groups_keep_the_best_and_worst_of_the_first(tmp_path):
    (tmp_path / "completions").mkdir()
    rows = 4096
    table = pandas.DataFrame(
        {
            "step": 1,
            "prompt": "p",
            "completion": [f"{row:05d}" * 1000 for row in range(rows)],
            "correct": range(rows),
            "advantage": 0.0,
        }
    )
    table.to_parquet(tmp_path / "completions" / "completions_00001.parquet")
    (step,) = sample(tmp_path, {"correct": 1.0}, "correctness")["steps"]
    (group,) = step["groups"]
    assert [row["reward"] for row in group["completions"]] == [4095.0, 0.0]
    assert group["size"] == step["rows"] == rows


def test_the_bound_holds_for_what_is_written(tmp_path):
    (tmp_path / "completions").mkdir()
    texts = ["<" * MAX_LENGTH] * 1000
    table = pandas.DataFrame({"step": 1, "prompt": [f"p{row // 4}" for row in range(1000)], "completion": texts})
    table.to_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert MAX_SIZE / 2 < len(as_data(sample(tmp_path, {}, "correctness")).encode()) < MAX_SIZE + 10_000


@pytest.mark.parametrize("steps", [MAX_POINTS + 1, 1001, 1201, 100_000])
def test_a_long_curve_is_thinned_out_with_its_extremes(steps):
    points = [(step, float(step % 7)) for step in range(steps)]
    points[steps // 3], points[steps // 2] = (steps // 3, 99.0), (steps // 2, -99.0)
    kept = thinned(points)
    assert MAX_POINTS // 2 <= len(kept) <= MAX_POINTS
    assert {points[steps // 3], points[steps // 2]} <= set(kept)
    assert kept == sorted(kept)
    assert set(kept) <= set(points)
    assert thinned(points[:MAX_POINTS]) == points[:MAX_POINTS]


def test_a_curve_is_broken_where_steps_are_missing():
    points = [(step, 1.0 + step % 3) for step in range(100) if not 40 <= step < 60]
    assert [point for point in thinned(points) if point[1] is None] == [(49.5, None)]
    assert len(line(thinned(points)).split("█")) > 2


def test_charts_of_values_have_labels_that_differ():
    heights = {f"task.prompt={'x' * 40}{end}": height for end, height in (("a", 1.0), ("b", None))}
    rows = bars("two", heights, "GiB").spec["data"]["values"]
    assert [(row["shown"], len(row["of"]) < 30) for row in rows] == [("1", True), ("×", True)]
    assert rows[0]["of"] != rows[1]["of"]
    spec = accuracy_by_value("one", {"2": [(0.5, 0.4, 0.6)], "4": []}, 0.1).spec
    assert spec["layer"][1]["encoding"]["x"]["scale"]["domain"] == ["2", "4"]


def test_the_data_beside_the_page_say_the_same(composed, tmp_path):
    folder = write_run(tmp_path / "run", **RUN)
    page, data = page_of(folder), json.loads((folder / "report.json").read_text())
    assert [(tile["name"], tile["shown"], tile["changed"]) for tile in data["tiles"]] == [
        ("held-out accuracy", "95.0%", "+84.0 points"),
        ("sampled accuracy", "32.8%", "+2.1 points"),
        ("reward", "0.328", "+0.0206"),
        ("completion length", "20.0 tokens", "−0.2 tokens"),
        ("speed", "0.4 s/step", "no change"),
        ("memory", "0.70 GiB", "no change"),
    ]
    assert all(f"{tile['shown']}</p>" in page for tile in data["tiles"])
    assert data["settings"]["per step"] == "128 completions in groups of 8"
    titles = [curve["title"] for curve in data["curves"] if curve["title"] != "Learning rate"]
    assert titles == [chart["title"] for chart in data_of(page, "charts")]
    assert data["constants"] == ["learning rate 0.0003"]
    assert data["heading"] | {"date": ""} == {
        "model": "tiny",
        "task": "",
        "steps": "4 steps",
        "duration": "60 s",
        "date": "",
    }
    assert data["curves"][0]["held_out"] == [[0, 0.11, 0.07, 0.16], [4, 0.95, 0.91, 0.97]]
    assert {"version", "title", "status", "reason", "evaluation", "findings", "command", "memory_gib"} <= data.keys()


def test_a_finding_quotes_the_completions_that_it_is_about(composed, tmp_path):
    folder = write_run(tmp_path / "run", text="<b>", **RUN)
    lines = (folder / "metrics.jsonl").read_text().splitlines() * 10
    truncated = {"completions/clipped_ratio": 0.6}
    rows = [json.loads(line) | truncated | {"step": step} for step, line in enumerate(lines, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for file in (folder / "completions").iterdir():
        table = pandas.read_parquet(file)
        table.assign(tokens=24, truncated=table["correctness"] < 1).to_parquet(file)
    page = page_of(folder)
    (finding,) = (
        one for one in json.loads((folder / "report.json").read_text())["findings"] if one["name"] == "cut_off"
    )
    assert [(one["step"], one["row"]) for one in finding["completions"]] == [(4, 0), (4, 2)]
    assert '&lt;b&gt; answer 0 <a href="#step=4&amp;row=0">step 4, completion 0</a>' in page


def test_the_page_of_a_sweep_compares_its_jobs(composed, tmp_path):
    for number, (generations, accuracy) in enumerate([(2, 0.6), (4, 0.9), (8, 0.7)]):
        folder = write_run(tmp_path / str(number), typed=(f"train.num_generations={generations}",), **RUN)
        part = {"accuracy": accuracy, "samples": 200, "interval": [accuracy - 0.05, accuracy + 0.05]}
        (folder / "evaluation.json").write_text(json.dumps({"before": {**part, "accuracy": 0.1}, "after": part}))
    (tmp_path / "2" / "summary.json").write_text(json.dumps({"status": "failed", "reason": "killed <by> SIGKILL"}))
    (tmp_path / SWEEP).write_text(json.dumps({"overrides": [], "comparison": "prompts per step change"}))
    page = page_of(tmp_path)
    assert "tiny, over train.num_generations</h1>" in page
    assert "1 not completed" in page
    assert "killed &lt;by&gt; SIGKILL" in page
    assert "prompts per step change" in page
    assert "python -m grpo.train train.num_generations=4</pre>" in page
    assert "Peak memory over train.num_generations, GiB" in page
    assert "Held-out accuracy over train.num_generations" in page
    assert '<a href="1/report.html">' in page
    assert (
        page.index("Best job</h2>")
        < page.index("Comparison</h2>")
        < page.index("Jobs</h2>")
        < page.index("Charts</h2>")
    )
    assert re.findall(r'<td><a href="(.)/', page) == ["1", "2", "0"]
    accuracy, memory, *curves = data_of(page, "charts")
    assert accuracy["title"].startswith("Held-out accuracy")
    assert memory["title"].startswith("Peak memory")
    assert curves[0]["labels"] == ["num_generations=4", "num_generations=8", "num_generations=2"]


def test_seeds_of_a_sweep_are_grouped_with_an_interval(composed, tmp_path):
    for number, (generations, seed, accuracy) in enumerate([(4, 1, 0.5), (4, 2, 0.7), (8, 1, 0.8), (8, 2, 0.9)]):
        folder = write_run(
            tmp_path / str(number), typed=(f"train.num_generations={generations}", f"train.seed={seed}"), **RUN
        )
        part = {"accuracy": accuracy, "samples": 200, "interval": [accuracy - 0.05, accuracy + 0.05]}
        (folder / "evaluation.json").write_text(json.dumps({"after": part}))
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        rows = [row | {"reward": accuracy * row["step"]} for row in map(json.loads, lines)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    swept = ["train.num_generations", "train.seed"]
    (tmp_path / SWEEP).write_text(json.dumps({"overrides": [], "comparison": None, "swept": swept}))
    groups = groups_of(read_sweep(tmp_path), swept[:1])
    intervals = accuracies_of(groups)
    assert [(group.label, len(group.runs)) for group in groups] == [("num_generations=4", 2), ("num_generations=8", 2)]
    half = 4.303 * ((0.02 + 0.005) / 2) ** 0.5 / 2**0.5  # Student's with two degrees of freedom
    assert intervals["num_generations=4"] == pytest.approx((0.6, 0.6 - half, 0.6 + half))
    assert intervals["num_generations=8"] == pytest.approx((0.85, 0.85 - half, 1.0))
    page = page_of(tmp_path)
    charts = {chart["title"]: chart for chart in data_of(page, "charts")}
    assert "Held-out accuracy over train.seed" not in charts
    assert charts["Reward"]["lines"]["num_generations=4"][0] == pytest.approx([1, 0.6, 0.5, 0.7])
    assert "num_generations=8, seed=2, on" in page, "the sentences about accuracy are about jobs"


def test_a_second_setting_of_a_sweep_has_colours(composed, tmp_path):
    for number, (generations, beta) in enumerate([(4, 0.0), (4, 0.1), (8, 0.0), (8, 0.1)]):
        write_run(tmp_path / str(number), typed=(f"train.num_generations={generations}", f"train.beta={beta}"), **RUN)
    swept = ["train.num_generations", "train.beta"]
    (tmp_path / SWEEP).write_text(json.dumps({"overrides": [], "comparison": None, "swept": swept}))
    first, second, *_ = data_of(page_of(tmp_path), "charts")
    assert (first["title"], first["labels"]) == (
        "Held-out accuracy over train.num_generations",
        ["beta=0.0", "beta=0.1"],
    )
    assert second["labels"] == ["num_generations=4", "num_generations=8"]


def test_curves_that_do_not_change_are_text():
    rate = Curve("Learning rate", "", {"rate": [(1, 3e-4), (1.5, None), (2, 3e-4)]})
    lengths = Curve("Length, tokens", "", {"a": [(1, 5.0)], "b": [(1, 7.0)]})
    changing = Curve("Reward", "", {"reward": [(1, 0.0), (2, 0.5)]})
    evaluated = Curve("Accuracy", "", {}, True, [(0, 0.1, 0.0, 0.2)])
    kl = Curve("KL, nats", "", {"KL": [(1, 0.0)]}, True)
    texts = constants([rate, lengths, changing, evaluated, kl])
    assert [*texts.values()] == ["learning rate 0.0003", "length 5 tokens (a), 7 tokens (b)", "KL 0.0%"]


def test_charts_may_be_drawn_over_minutes_and_tokens(composed, tmp_path):
    folder = write_run(tmp_path / "run", **RUN)
    rows = [{"step": step, "step_time": 6.0, "num_tokens": 100.0 * step} for step in (10, 20, 25)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert axes_of(read_run(folder)) == {
        "step": [0, 10, 20, 25],
        "minutes": [0, 1, 2, 2.5],
        "tokens": [0, 1000, 2000, 2500],
    }
    rows = [{"step": step, "reward": 1.0} for step in range(1, 10_000)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    axes = axes_of(read_run(folder))
    assert [*axes] == ["step"]
    assert len(axes["step"]) <= MAX_POINTS + 1
    assert axes["step"][-1] == 9999


def test_every_logged_metric_is_in_the_page(page):
    metrics = data_of(page, "drawing")["metrics"]
    assert metrics["num_tokens"] == [[1, 100.0], [2, 200.0], [3, 300.0], [4, 400.0]]
    assert "<option>num_tokens</option>" in page
    assert "step" not in metrics


def test_a_mean_over_runs_ends_with_the_shortest():
    lines = [[(1, 0.0), (2, 1.0), (3, 5.0)], [(1, 1.0), (1.5, None), (2, 2.0)]]
    assert mean_of(lines) == [(1, 0.5, 0.0, 1.0), (2, 1.5, 1.0, 2.0)]
    assert mean_of(lines[:1]) is lines[0]


def test_tokens_per_second_count_steps_that_are_not_logged(composed, tmp_path):
    folder = write_run(tmp_path / "run", **RUN)
    rows = [{"step": step, "step_time": 0.5, "num_tokens": 100.0 * step} for step in (10, 20, 25)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_run(folder).tokens_per_second == 200


@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:VICTIM}",
        "a ${ oc.env:VICTIM,none} b",
        "${oc.${reader}:VICTIM}",
        "${${whole}:VICTIM}",
        "${oc.decode:${part}}",
    ],
)
def test_the_reader_of_a_run_does_not_resolve_its_environment(value, composed, tmp_path, monkeypatch):
    """A secret is stored as a reference, and a run of somebody else may refer to whatever it likes."""
    monkeypatch.setenv("VICTIM", "of-the-reader")
    folder = write_run(tmp_path / "run", **RUN)
    for name in ("resolved_config.yaml", ".hydra/config.yaml"):
        content = OmegaConf.to_container(OmegaConf.load(folder / ".hydra" / "config.yaml"))
        content |= {"reader": "env", "whole": "oc.env", "part": "\\${oc.env:VICTIM}"}
        content["task"]["dataset"] |= {"path": value, "token": value}
        (folder / name).write_text(yaml.safe_dump(content))
        assert "of-the-reader" not in page_of(folder)


def test_a_value_with_dollars_and_brackets_is_shown_as_it_is(composed, tmp_path, capsys):
    for number, prompt in enumerate([r"'{question} $\boxed{}$ [/x]'", "'{question}'"]):
        write_run(tmp_path / str(number), typed=(f"task.prompt={prompt}",), **RUN)
    (tmp_path / SWEEP).write_text(json.dumps({"overrides": [], "comparison": None}))
    assert r"$\boxed{}$ [/x]" in page_of(tmp_path)
    print_sweep(read_sweep(tmp_path))
    assert r"$\boxed{}$" in capsys.readouterr().out.replace("\n", "").replace(" ", "")


def test_a_directory_with_neither_a_run_nor_a_sweep_says_so(tmp_path):
    with pytest.raises(ConfigError, match="neither a run nor a sweep is in it; name a directory such as outputs/"):
        write_report(tmp_path)
    with pytest.raises(ConfigError, match="there is no such directory"):
        write_report(tmp_path / "nowhere")


def test_a_run_configuration_with_a_library_option_is_read(composed, tmp_path):
    folder = write_run(tmp_path / "run", **RUN)
    config = compose("config", ["peft=qlora"])
    (folder / ".hydra" / "config.yaml").write_text(OmegaConf.to_yaml(config))
    assert "LoRA, r=" in page_of(folder)


def test_no_console_takes_text_for_markup():
    """Prompts, names of models and values of the configuration may have brackets such as `[/INST]`."""
    for file in [*(ROOT / "grpo").rglob("*.py"), *(ROOT / "rewards").rglob("*.py")]:
        for line_of_code in file.read_text().splitlines():
            assert not re.search(r"\bConsole\((?!console\))", line_of_code) or "markup=False" in line_of_code, file


def test_the_page_shows_engine_verdicts_of_a_run_they_ended(composed, tmp_path):
    folder = write_run(tmp_path / "run", **RUN)
    assert "engine check" not in page_of(folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows[0] |= {"engine/is_policy": 1.0, "engine/logp_difference": 0.004, "engine/tolerance": 0.15}
    last = {"step": len(rows), "engine/is_policy": 0.0, "engine/logp_difference": 0.83, "engine/tolerance": 0.15}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, last]))
    page = page_of(folder)
    assert "1 of 2 passed, largest difference 0.83 nats per token, below 0.15 is rounding" in page
    assert "Rollouts were made with other weights than those that are trained" in page


def test_a_run_whose_engine_cannot_be_checked_says_why(composed, tmp_path):
    typed = ("generation=vllm_colocate", "train.top_p=0.9", "train.vllm_importance_sampling_correction=false")
    page = page_of(write_run(tmp_path / "run", typed=typed, **RUN))
    assert "none, as train.top_p=0.9 changes the engine&#39;s log-probabilities alone" in page
