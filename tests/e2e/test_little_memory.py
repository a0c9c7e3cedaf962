"""Memory that really runs out, on the CPU: no injected fault."""

import json
import os
import sys
from pathlib import Path

import pytest

from grpo.config.schema import ROOT
from grpo.extras.testing.commands import finished

pytestmark = pytest.mark.slow


def test_a_far_too_large_budget_shrinks_and_keeps_the_gradient() -> None:
    script = Path(__file__).parent / "little_memory.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = finished([sys.executable, str(script)], env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["logs"][0]["update/oom_retries"] > 0
    assert found["logs"][1]["update/oom_retries"] == 0
    assert found["logs"][1]["update/max_tokens_per_microbatch"] < 10_000
    assert found["gradient"] <= 1e-5
