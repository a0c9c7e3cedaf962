"""Drafts by n-grams: the completions have the policy's distribution, and slow drafts end."""

import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo.config.schema import ROOT
from grpo.extras.testing.commands import finished
from grpo.generation.vllm.drafts import COUNTS, TRIALS, Drafts


class Scheduled:
    """Stands for vLLM's `LLM`: its scheduler, and its counters."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(COUNTS, 0.0)
        self.scheduler = SimpleNamespace(dynamic_sd_lookup=None, max_num_running_reqs=8)
        core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self.scheduler))
        self.llm_engine = SimpleNamespace(engine_core=core)

    def get_metrics(self) -> list[Any]:
        return [SimpleNamespace(name=name, value=value) for name, value in self.counts.items()]


@pytest.mark.parametrize("slower", [True, False])
def test_drafts_end_where_generation_is_slower_with_them(slower: bool, caplog: pytest.LogCaptureFixture) -> None:
    llm = Scheduled()
    drafts, modes = Drafts(llm), list[bool]()
    drafts.note(100.0, 10)  # vLLM compiles
    for _ in range(TRIALS):
        modes.append(llm.scheduler.dynamic_sd_lookup is None)
        drafts.note(2.0 if modes[-1] == slower else 1.0, 10)
    assert modes == [False, True] * (TRIALS // 2)
    for seconds in (50.0, 0.1):  # nothing is decided again
        assert drafts.is_on is not slower
        assert llm.scheduler.dynamic_sd_lookup == ([0] * 9 if slower else None)
        drafts.note(seconds, 10)
    ways = "200 ms per token with them, 100 without" if slower else "100 ms per token with them, 200 without"
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line == f"n-gram drafts {'are off from now on' if slower else 'stay on'}: {ways}"


def test_acceptance_is_of_the_tokens_since_the_last_step() -> None:
    llm = Scheduled()
    llm.counts = {COUNTS[0]: 70.0, COUNTS[1]: 90.0}  # of an engine before
    drafts = Drafts(llm)
    assert drafts.metrics() == {}
    llm.counts = {COUNTS[0]: 73.0, COUNTS[1]: 94.0}
    assert drafts.metrics() == {"engine/draft_acceptance": 0.75}
    assert drafts.metrics() == {}


@pytest.mark.vllm
def test_completions_with_drafts_have_the_policys_distribution(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "tests.drafts_by_enumeration", str(tmp_path)]
    done = finished(line, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
