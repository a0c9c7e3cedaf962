"""Memory that really runs out, on the CPU: no injected fault."""

import json
import os
import subprocess
import sys
from pathlib import Path

from grpo.config.schema import ROOT


def test_a_budget_far_too_large_shrinks_until_it_fits_and_the_gradient_is_the_same() -> None:
    script = Path(__file__).parent / "little_memory.py"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["logs"][0]["update/oom_retries"] > 0
    assert found["logs"][1]["update/oom_retries"] == 0
    assert found["logs"][1]["update/max_tokens_per_microbatch"] < 10_000
    assert found["gradient"] <= 1e-5
