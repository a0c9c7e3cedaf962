"""The real vLLM beside a policy that FSDP2 or ZeRO-3 shards over two processes, and the check of its transfers."""

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.test_sharded import HERE, on_two_processes

pytestmark = [pytest.mark.vllm, pytest.mark.long]

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs `make deepspeed`")
SHARDS = ["fsdp2", pytest.param("zero3", marks=needs_deepspeed)]
RUN = (
    *("generation=vllm_colocate", "train.max_steps=4", "train.learning_rate=1e-6", "train.optim=adamw_torch"),
    *("train.per_device_train_batch_size=8", "train.num_generations=4", "train.save_strategy=no", "task.eval.size=0"),
)


def run(shard: str, folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    line = (str(HERE / "train_on_cpus.py"), *RUN, f"shard={shard}", *options, f"hydra.run.dir={folder}/run")
    return on_two_processes(*line, folder=folder, **small, **variables)


def steps(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("options", [("peft=none",), ("peft=lora", "model.dtype=bfloat16")], ids=str)
def test_transfers_of_a_sharded_policy_arrive(shard: str, options: tuple[str, ...], tmp_path: Path) -> None:
    done = run(shard, tmp_path, *options)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = steps(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["engine/is_policy"] == 1
    rounding = 1e-2 if "model.dtype=bfloat16" in options else 1e-4
    assert max(row["sampling/sampling_logp_difference/mean"] for row in rows) < rounding


@pytest.mark.parametrize("shard", SHARDS)
def test_a_lost_transfer_of_a_sharded_policy_ends_the_run(shard: str, tmp_path: Path) -> None:
    done = run(shard, tmp_path, LOST_TRANSFER="3")
    assert done.returncode != 0
    assert "a transfer was lost" in done.stderr, done.stderr[-3000:]
    assert [row["step"] for row in steps(tmp_path)] == [1, 2]
