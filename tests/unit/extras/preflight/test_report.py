"""The report of samples: as data, on a terminal and as a page."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig
from rich.console import Console

from grpo.extras.preflight.first_step import FirstStep, Step
from grpo.extras.preflight.page import histogram, write_page
from grpo.extras.preflight.report import report, weights_of
from grpo.extras.preflight.samples import Sample, Sampled
from grpo.extras.preflight.sampling import Result, for_sampling
from grpo.extras.preflight.text import against, show
from grpo.planning.fit import make_plan
from grpo.reporting.vega import javascript

Compose = Callable[..., DictConfig]
COUNT = {"rows": 9, "used": 8, "too_long": 1, "unread_answer": 0, "not_a_number": 0, "held_out": 0}
FACTS: dict[str, Any] = {
    "model": "tiny",
    "engine": "transformers",
    "counts": {"train": COUNT},
    "duplicates": {"held_out": 0, "within": 2},
    "chat_template": None,
    "warning": "a warning",
    "begins_thought": False,
    "faults": {},
}
FIRST_STEP = FirstStep([Step(1e-5, 1e-7, 0.01), Step(3e-4, 1e-4, 0.3), Step(1e-2, None, 0.0)], 0.01)
HOSTILE = "</script><img src=x onerror=alert(1)>"


def samples(correct: list[list[bool]]) -> list[Sampled]:
    def made(one: bool, number: int) -> Sample:
        return Sample(f"#### {number}{HOSTILE}", 3 + number, True, {"correctness": float(one)}, one)

    return [
        Sampled(str(place), place, f"question {place}", "1", [made(one, n) for n, one in enumerate(row)], {
            "generate": 0.1,
            "reward": 0.01,
        })
        for place, row in enumerate(correct)
    ]  # fmt: skip


@pytest.fixture
def found(composed: Compose) -> tuple[dict[str, Any], list[Sampled], DictConfig]:
    line = ["train.num_generations=2", "plan.hourly_price=2"]
    config = composed(*line)
    problems = samples([[True, False, False, False], [False] * 4, [True] * 4, [True, True, False, False]])
    return report(Result(problems, FACTS, FIRST_STEP), config, line, make_plan(config)), problems, config


def test_a_report_has_what_its_samples_say(found: tuple[dict[str, Any], list[Sampled], DictConfig]) -> None:
    content, _, _ = found
    assert content["accuracy"]["value"] == pytest.approx(7 / 16)
    assert content["accuracy"]["pass@k"]["4"]["value"] == 0.75
    fractions = {row["num_generations"]: row["fraction"]["value"] for row in content["groups"]}
    assert fractions[2] == pytest.approx((3 / 6 + 4 / 6) / 4)
    assert fractions[4] == 0.5
    assert content["learns"]
    assert content["learning_rate"]["configured"] == 3e-4
    assert content["time"]["measured"] == ["generation", "rewards", "update"]
    assert content["time"]["cost"] == pytest.approx(2 * content["time"]["run_s"] / 3600)
    json.dumps(content, allow_nan=False)


def test_the_text_ends_with_the_verdict_and_a_command(
    found: tuple[dict[str, Any], list[Sampled], DictConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    content, _, _ = found
    show(content, Console(width=100))
    text = capsys.readouterr().out
    assert "a warning" in text
    assert "now 2" in text
    assert text.index(content["verdict"]) < text.index(content["command"])
    assert text.rstrip().endswith(content["command"])
    rates = content["learning_rate"] | {"configured": 0.0}
    show(content | {"learns": False, "suggestions": [], "learning_rate": rates}, Console(width=100))
    text = capsys.readouterr().out
    assert "train.learning_rate=0; about" in text
    assert content["command"] not in text, "nothing is to be run"


def test_the_page_is_self_contained_and_escapes_completions(
    found: tuple[dict[str, Any], list[Sampled], DictConfig], tmp_path: Path
) -> None:
    content, problems, config = found
    (tmp_path / ".hydra").mkdir()
    page = write_page(tmp_path, content, problems, weights_of(config), "correctness").read_text()
    assert content["verdict"] in page
    assert HOSTILE not in page
    assert not re.findall(r'(?:src|href)="(?!#)', page.replace(javascript(), ""))
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    assert [group["size"] for group in data["steps"][0]["groups"]] == [4] * 4
    assert data["steps"][0]["groups"][0]["completions"][0]["reward"] == 1
    assert page.count("<figure>") == 6


def test_what_speaks_against_a_run_follows_the_verdict(
    found: tuple[dict[str, Any], list[Sampled], DictConfig], tmp_path: Path
) -> None:
    content, problems, config = found
    assert against(content) == [("warning", "a warning")]
    content |= {"warning": None, "counts": {"train": COUNT | {"unread_answer": 3}}}
    content["rewards"]["correctness"] |= {"varies": 0.0}
    content["lengths"]["truncated"]["value"] = 0.4
    names = [name for name, _ in against(content)]
    assert names == ["answers", "truncated", "reward"]
    (tmp_path / ".hydra").mkdir()
    page = write_page(tmp_path, content, problems, weights_of(config), "correctness").read_text()
    places = [
        page.index(text) for text in (content["verdict"], "What speaks against it", "3 answers not found", "Samples")
    ]
    assert places == sorted(places)
    assert page.count("3 answers not found") == 1
    content["counts"]["train"]["unread_answer"] = 0
    content["rewards"]["correctness"]["varies"] = 1.0
    content["lengths"]["truncated"]["value"] = 0.0
    assert against(content) == []


def test_a_histogram_has_a_bar_per_value_or_per_range() -> None:
    assert histogram([0.0, 1.0, 1.0]) == {"0": 1.0, "1": 2.0}
    many = histogram([float(number) for number in range(120)])
    assert len(many) == 12
    assert set(many.values()) == {10.0}


def test_one_process_samples_the_batch_of_all(composed: Compose) -> None:
    config = composed("launch.processes=4", "shard=fsdp2", "train.per_device_train_batch_size=8", "engine.staleness=1")
    alone = for_sampling(config)
    assert alone.train.gradient_accumulation_steps == 4 * config.train.gradient_accumulation_steps
    assert (alone.launch.processes, alone.train.fsdp, alone.engine.staleness) == (1, None, 0)
    assert config.launch.processes == 4, "the run's own is as it was"
