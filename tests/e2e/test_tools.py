"""Runs with tools, environments and reward models, as from a terminal."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pandas import read_parquet
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from grpo.config.schema import ROOT
from grpo.extras.testing.commands import command

SMALL = ["+experiment=calculator", "task.dataset.size=64", "task.eval.size=8", "train.max_steps=3"]
SMALL += ["train.per_device_train_batch_size=16", "train.num_generations=4"]
MINE = '''
import os

class Oracle:
    """Its method is named as the tool that the built-in policy knows."""

    def reset(self, answer: str, **columns):
        self.answer, self.asked = answer, 0

    def calculator(self, expression: str) -> str:
        """Tell the answer; hang if it is odd, and die if it is a multiple of four.

        Args:
            expression: Any
        """
        self.asked += 1
        number = int(self.answer)
        while number % 2 == 1:
            pass
        if number % 4 == 0:
            os._exit(1)
        return self.answer

    def get_reward(self) -> float:
        return float(self.asked)


class NoReset:
    def calculator(self, expression: str) -> str:
        """Nothing.

        Args:
            expression: Any
        """


def untyped(expression):
    """Nothing.

    Args:
        expression: Any
    """


def asked(environments, completions):
    return [float(getattr(environment, "asked", 0)) for environment in environments]
'''


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_with_dynamic_sampling_calls_its_tool(tmp_path: Path) -> None:
    done = command("grpo.train", *SMALL, "rollout.dynamic_sampling=true", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the policy may call calculator" in done.stderr
    rows = metrics(tmp_path / "run")
    assert all(0 < row["tools/call_frequency"] <= 1 and row["tools/unanswered"] < 0.5 for row in rows)
    assert sum(row["tools/calculator/calls"] for row in rows) >= sum(row["tools/call_frequency"] for row in rows) * 16
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy_before"] is not None
    (first, *_) = sorted((tmp_path / "run" / "completions").glob("*.parquet"))
    conversations = read_parquet(first)["completion"]
    assert {tuple(turn["role"] for turn in messages) for messages in conversations} >= {
        ("assistant", "tool", "assistant")
    }
    page = (tmp_path / "run" / "report.html").read_text()
    assert '"who":"call","text":"calculator(expression=' in page
    assert "ool calls of a step" in page, "a chart, or a constant"
    assert "<dt>tools</dt><dd>grpo.builtin.tasks.calculator.calculator</dd>" in page
    refused = command("grpo.evaluate", "run", cwd=tmp_path)
    assert refused.returncode == 2
    assert "only a run evaluates a policy with its tools" in refused.stderr


@pytest.mark.long
@pytest.mark.slow
def test_a_hanging_or_dying_environment_costs_its_own_episodes(mine: Path) -> None:
    line = [
        "task.tools=[]",
        "task.environment=mine.py:Oracle",
        "task.tool_timeout=0.5",
        "reward=[]",
        "+reward.asked.fn=mine.py:asked",
    ]
    done = command("grpo.train", *SMALL, *line, "train.max_steps=4", "hydra.run.dir=run", cwd=mine)
    assert done.returncode == 0, done.stderr
    rows = metrics(mine / "run")
    assert sum(row["tools/calculator/errors"] for row in rows) > 0
    assert sum(row["tools/calculator/calls"] for row in rows) > sum(row["tools/calculator/errors"] for row in rows)
    assert all(row["tools/reset/errors"] == 0 for row in rows)
    logged = [read_parquet(file) for file in (mine / "run" / "completions").glob("*.parquet")]
    for step in logged:  # both count the calls of an episode; one that has ended has no reward of its own
        both = step.dropna(subset=["Oracle"])
        assert (both["asked"] == both["Oracle"]).all()
        results = [turn["content"] for messages in step["completion"] for turn in messages if turn["role"] == "tool"]
        assert all(result.isdecimal() or result.startswith("{'error': ") for result in results)
    assert "took longer than 0.5 s and was stopped" in (mine / "run" / "train.log").read_text()


@pytest.mark.long
@pytest.mark.slow
def test_a_reward_model_scores_beside_a_function(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "grpo" / "builtin" / "tiny")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForSequenceClassification(LlamaConfig(vocab_size=len(tokenizer), num_labels=1, **shape)).save_pretrained(
        tmp_path / "scorer"
    )
    tokenizer.save_pretrained(tmp_path / "scorer")
    named = "reward.model.kwargs.model_name_or_path=scorer"
    small = ["task.eval.size=8", "train.max_steps=2", "train.per_device_train_batch_size=16"]
    done = command("grpo.train", *small, "+reward=model", named, "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(
        {"rewards/model/mean", "rewards/correctness/mean", "memory/reward_gb"} <= row.keys()
        for row in metrics(tmp_path / "run")
    )
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["phases"]["reward"]["reward models"] > 0
    checked = command("rewards.check", "model", "model_name_or_path=scorer", "dtype=float32", cwd=tmp_path)
    assert checked.returncode == 1  # a random model rewards incorrect answers
    assert "earned more than it should" in checked.stdout
    for overrides, says in {
        ("rollout.dynamic_sampling=true",): "those of reward.model, a reward model, are never equal",
        ("task.eval.reward=model",): "the score of a reward model is no accuracy",
        (f"reward.model.kwargs.model_name_or_path={ROOT / 'grpo' / 'builtin' / 'tiny'}",): "not a reward model",
        ("reward.model.kwargs.model_name_or_path=./none",): "there is no model in this folder",
        ("reward.model.kwargs.dtype=float23",): "possible: float32, float16, bfloat16",
    }.items():
        wrong = command("grpo.train", *small, "+reward=model", named, *overrides, cwd=tmp_path)
        assert_one_line(wrong, says)


def assert_one_line(done: Any, says: str) -> None:
    assert done.returncode == 2, (says, done.stderr, done.stdout)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("grpo.train: ")]
    assert says in line
    assert "Traceback" not in done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_unusable_tools_and_environments_fail_with_one_line(mine: Path) -> None:
    odd = mine / "odd"
    shutil.copytree(
        ROOT / "grpo" / "builtin" / "tiny_calculator", odd, ignore=shutil.ignore_patterns("*.py", "__pycache__")
    )
    template = odd / "chat_template.jinja"
    template.write_text(
        template.read_text().replace("{{ eos_token }}", "{{ '' if loop.last else '!' }}{{ eos_token }}")
    )
    cases: dict[str, list[str]] = {
        "The chat template is not training-compatible (missing prefix-preservation": ["model.model_name_or_path=odd"],
        "tools are called in conversations: task.conversational=true": ["task.conversational=false"],
        "task.tools: untyped: Argument expression is missing a type hint": ["task.tools=[mine.py:untyped]"],
        "task.environment: NoReset has no method reset": ["task.environment=mine.py:NoReset"],
        "task.tools: nothing.py:f: there is no file": ["task.tools=[nothing.py:f]"],
        "task.tool_timeout=0: a positive number": ["task.tool_timeout=0"],
        "train.max_tool_calling_iterations=0: at least 1": ["train.max_tool_calling_iterations=0"],
        "The provided chat template does not support tool calling": ["model=tiny"],
        "rollout.max_rounds=0: at least 1": ["rollout.max_rounds=0"],
        "engine.staleness=1: only a server generates": ["engine.staleness=1"],
        "environments, which an evaluation does not have": ["+reward.asked.fn=mine.py:asked", "task.eval.reward=asked"],
    }
    for says, overrides in cases.items():
        assert_one_line(command("grpo.train", *SMALL, *overrides, cwd=mine), says)
