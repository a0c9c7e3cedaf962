"""Numbers of README.md and docs/first_run.md are those that benchmarks have written."""

import json
from statistics import mean, median
from typing import Any

import pytest

from benchmarks import demo, guard, replay, shown
from benchmarks import preflight_page as page
from benchmarks.pages import with_part
from grpo.config.schema import ROOT

README, COMPARISON = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/comparison.md"))


def written(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))


def row(start: str) -> list[str]:
    (line,) = [line for line in README.splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_the_demo_reaches_what_the_readme_says() -> None:
    runs = written("demo")["runs"]
    of_the_demo = next(run for run in runs if run["seed"] == demo.OF_THE_DEMO)
    before, after = (f"{of_the_demo[when]:.0%}".replace("%", " %") for when in ("before", "after"))
    assert f"from {before} to {after} of 200 held-out" in README
    assert with_part(demo.PAGE, "benchmarks.demo", demo.part(runs)) == demo.PAGE.read_text(encoding="utf-8")


def test_pages_of_forecasts_and_findings_have_measured_tables() -> None:
    content = written("preflight")
    results, total = content["runs"], content["summary"]
    parts = (page.of_all(total), page.of_kinds(results), page.of_misses(results), page.of_rates(results))
    for file, part in ((page.PAGE, "\n".join(parts)), (page.FINDINGS_PAGE, page.of_findings(results))):
        assert with_part(file, page.MODULE, part) == file.read_text(encoding="utf-8")
    assert total["false_alarms"] <= 3
    assert total["misses"] <= 5


def test_the_page_of_replays_has_the_measured_table() -> None:
    content = written("replay")
    assert with_part(replay.PAGE, "benchmarks.replay", replay.part(content)) == replay.PAGE.read_text(encoding="utf-8")
    assert not any(row["named"] for row in content["rows"] if not row["stage"])
    assert content["named"] >= 24


def test_the_page_of_the_guard_has_the_measured_table() -> None:
    content = written("guard")
    page = guard.PAGE.read_text(encoding="utf-8")
    assert with_part(guard.PAGE, "benchmarks.guard", guard.table(content["summary"])) == page
    *unstable, healthy = content["summary"]
    assert guard.summary(content["runs"]) == content["summary"]
    assert all(row["kept_best"] == row["fell"] == row["runs"] for row in unstable)
    assert healthy["fell"] <= 0.05 * healthy["runs"]


@pytest.mark.parametrize(
    ("start", "place"),
    [
        ("update: lengths that differ, half of the groups zero-variance", 0),
        ("update: the same, every group with non-zero variance", 1),
        ("update: completions of equal length", 2),
        ("update: prompts of up to 512 tokens", 3),
    ],
)
def test_updates_take_the_measured_times(start: str, place: int) -> None:
    result = written("update_cpu")["results"][place]
    seconds, peaks = ([median(result[name][who]) for who in ("trl", "ours")] for name in ("seconds", "peak_gb"))
    assert row(start) == [
        *(f"{value:.0f} s" for value in seconds),
        f"{result['time_ratio']:.1f}x",
        " -> ".join(f"{value:.1f}" for value in peaks),
    ]


@pytest.mark.parametrize(
    ("start", "place"),
    [
        ("generation without vLLM: prompts of 128 to 512 tokens", "uneven"),
        ("generation without vLLM: prompts with an image", "images"),
    ],
)
def test_generation_takes_the_measured_times(start: str, place: str) -> None:
    result = written("read_once_cpu")["results"][place]
    seconds, peaks = ([median(result[name][who]) for who in ("trl", "ours")] for name in ("seconds", "peak_gb"))
    assert row(start) == [
        *(f"{value:.0f} s" for value in seconds),
        f"{result['ratio']:.1f}x",
        " -> ".join(f"{value:.1f}" for value in peaks),
    ]


@pytest.mark.parametrize(
    ("start", "workload"),
    [
        ("lengths that differ, half of the groups zero-variance", "a"),
        ("lengths that differ", "b"),
        ("completions of equal length", "c"),
        ("prompts of up to 512 tokens", "d"),
    ],
)
def test_updates_on_an_h100_take_the_measured_times(start: str, workload: str) -> None:
    result = written("gpu")["results"]["update without gradient checkpointing"][workload]
    seconds, peaks = ([mean(result[name][who]) for who in ("trl", "ours")] for name in ("seconds", "peak_gb"))
    assert row(start) == [
        *(f"{value:.2f} s" for value in seconds),
        f"{result['time_ratio']:.1f}x",
        " -> ".join(f"{value:.1f}" for value in peaks),
    ]


def test_updates_on_an_h200_take_the_measured_times() -> None:
    cell = written("gpu_h200")["cells"]["4b lora 16k"]
    text = " ".join(README.split())
    assert f"{cell['seconds_per_microbatch']:.2f} s and {cell['peak_gib']:.1f} GiB" in text
    assert f"{cell['prime_rl_s']} s and {cell['prime_rl_gib']} GiB" in text


def test_a_step_of_the_demo_takes_the_measured_time() -> None:
    runs = written("train")["runs"]
    of_both = [[run for run in runs if run["trainer"] == who] for who in ("trl", "ours")]
    seconds = [median(run["step_s"] for run in of_trainer) for of_trainer in of_both]
    peaks = [median(run["peak_host_gb"] for run in of_trainer) for of_trainer in of_both]
    assert row("whole step of the demo") == [
        *(f"{value:.2f} s" for value in seconds),
        f"{seconds[0] / seconds[1]:.1f}x",
        " -> ".join(f"{value:.1f}" for value in peaks),
    ]


def test_the_peers_take_the_measured_times() -> None:
    results = written("peers_cpu")["results"]
    peers = [results[name] for name in ("trl", "ms-swift", "verl", "ours")]
    assert row("seconds") == [f"{mean(peer['seconds']):.0f}" for peer in peers]
    assert row("peak memory, GiB") == [f"{mean(peer['peak_gib']):.1f}" for peer in peers]


def test_plans_and_forecasts_are_as_often_right() -> None:
    complete = written("published")["summary"]["complete"].values()
    near, all_of_them = (sum(counts[place] for counts in complete) for place in (0, 1))
    assert f"[{near} of {all_of_them}]" in README
    assert f"[{near} of {all_of_them}]" in COMPARISON
    forecasts = written("preflight")["summary"]
    assert f"{forecasts['right']} of {forecasts['runs']} verdicts" in README


def test_families_are_as_many_as_were_tried() -> None:
    assert f"of the {len(written('families')['families'])}](models.md)" in COMPARISON


def test_outputs_that_pages_show_are_what_the_commands_print() -> None:
    printed = written("shown")
    for file in shown.PAGES:
        for command, lines in shown.blocks(file):
            rest = iter(printed[command])
            assert all(line == "…" or line in rest for line in lines), (file.name, command)


def test_gradients_and_replays_are_as_exact_as_measured() -> None:
    replayed, on_cpus, on_a_gpu = written("replay"), written("exactness"), written("gpu")
    assert f"[{replayed['named']} of {replayed['planted']}]" in README
    cases = on_cpus["relative_difference"].values()
    assert f"[{len(cases)} cases]" in README
    assert max(case["gradient"] for case in cases) < 1e-5
    in_float32 = on_a_gpu["results"]["exactness in float32"]["float32 against TRL"].values()
    assert len(in_float32) == 6
    assert f"gradients of six cases differ from TRL's by at most {max(in_float32):.1e}".replace(
        "e-0", "e-"
    ) in " ".join(README.split())
    forecasts = written("preflight")["summary"]
    assert f"[{forecasts['right']} verdicts were correct]" in (ROOT / "docs" / "preflight.md").read_text(
        encoding="utf-8"
    )


def test_verls_prefix_grouper_takes_the_measured_time() -> None:
    results, text = written("peers_prefix_grouper_cpu")["results"], " ".join(COMPARISON.split())
    ours, engine, grouper = (
        f"{mean(results[name]['seconds']):.1f} s" for name in ("ours", "verl", "verl, prefix grouper")
    )
    assert f"take {grouper}, verl's engine takes {engine} and this trainer {ours}, with equal gradients" in text
    assert max(result["gradient_difference"] for result in results.values()) < 1e-5
