"""Run by a test in a process of its own: the address space is limited, and the budget far too large for it."""

import json
import resource
import tempfile
from pathlib import Path

from datasets import Dataset

from grpo.trainer import ExactGRPOTrainer, Update
from tests.stock_trl import make, relative_difference, train


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    options = {
        "per_device_train_batch_size": 768,
        "num_generations": 4,
        "train_dataset": Dataset.from_dict({"prompt": [f"How many ? {i}" for i in range(384)]}),
    }
    reference = train(make(ExactGRPOTrainer, folder, update=Update(1000, share_prompts=False), **options))
    trainer = make(ExactGRPOTrainer, folder, update=Update(1_000_000, share_prompts=False), **options)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 10 * 2**20, resource.RLIM_INFINITY))
    record = train(trainer)
    pairs = zip(record.gradients, reference.gradients, strict=True)
    print(json.dumps({"logs": record.logs, "gradient": max(relative_difference(mine, stock) for mine, stock in pairs)}))


if __name__ == "__main__":
    main()
