"""Host memory of two processes while FSDP2 divides a policy: by accelerate, and by this trainer, one after the other.

`python -m benchmarks.loading` takes a minute, needs no GPU, and writes `benchmarks/loading.json`: SmolLM2-135M's shape
in bfloat16, trained in float32. On a CPU the shards are in host memory, too.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin, gather_object
from transformers import AutoModelForCausalLM

from benchmarks.update import build_policy
from grpo.config.schema import ROOT
from grpo.trainer.placement import prepare_for_fsdp, sent_by_rank_0
from grpo.utils.limits import GB

WAYS = ("accelerate", "ours")


def anonymous() -> float:
    """Return the memory of this process without the files that it has mapped, GiB."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024 / GB


def divide(way: str, folder: str) -> None:
    """Divide a policy over the processes of a launcher; rank 0 prints the memory of each, GiB, as JSON."""
    from tests.sharding_on_cpus import enable

    enable()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin, cpu=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    prepare_for_fsdp(model)
    before, most = anonymous(), [0.0]
    stock = torch.distributed.fsdp.fully_shard

    def noting(*args: Any, **options: Any) -> Any:
        most[0] = max(most[0], anonymous())
        return stock(*args, **options)

    torch.distributed.fsdp.fully_shard = noting
    optimizer = torch.optim.SGD(model.parameters())
    with sent_by_rank_0() if way == "ours" else nullcontext():
        model, _ = accelerator.prepare(model, optimizer)
    weights = sum(weight.full_tensor().double().sum().item() for weight in model.parameters())
    result = {"sum": weights, "before shards": most[0] - before, "shards": anonymous() - before}
    ranks = gather_object([result])
    if accelerator.is_main_process:
        print("RESULT " + json.dumps(ranks), flush=True)


def main() -> None:
    """Run both, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2_135m", help="a choice of conf/model")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "loading.json")
    options = parser.parse_args()
    if options.way:
        divide(options.way, options.folder)
        return
    found: dict[str, Any] = {"date": str(date.today()), "model": options.model}
    with tempfile.TemporaryDirectory() as folder:
        policy = build_policy(options.model, "cpu", torch.bfloat16)
        found["float32 gib"] = round(4 * sum(weight.numel() for weight in policy.parameters()) / GB, 3)
        policy.save_pretrained(folder)
        del policy
        for way in WAYS:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            command += ["-m", "benchmarks.loading", "--way", way, "--folder", folder]
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if not lines:
                sys.exit(done.stdout[-2000:] + done.stderr[-6000:])
            ranks = json.loads(lines[0])
            sums = {result["sum"] for result in ranks}
            found[way] = {name: [round(result[name], 3) for result in ranks] for name in ("before shards", "shards")}
            assert found.setdefault("sum", sums) == sums, "other weights"
    del found["sum"]
    print(json.dumps(found, indent=1))
    options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
