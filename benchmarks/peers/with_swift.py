"""ms-swift's update, in an environment that has ms-swift; see `benchmarks.peers`.

Its command for GRPO builds policy, template and trainer. In the place of training, the trainer gets the rollouts and
computes a step of slices of a group each, as TRL's does: it pads a slice to its own longest sequence.
"""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from swift.pipelines.train.rlhf import SwiftRLHF
from swift.rl_core.data import GRPOSample

from benchmarks.peers.turns import POLICY, ROLLOUTS, gradient_of, serve


class Served(SwiftRLHF):
    """ms-swift's command, which computes updates of fixed rollouts instead of training."""

    def train(self, trainer: Any) -> None:
        """Serve."""
        folder = Path(sys.argv[1])
        rollouts = json.loads((folder / ROLLOUTS).read_text())
        slices = len(rollouts["prompts"]) // rollouts["group"]
        trainer._rollout_samples = lambda inputs: samples(rollouts)
        trainer.reward_funcs = [lambda completions, **columns: rollouts["rewards"]]
        trainer.current_gradient_accumulation_steps = slices
        trainer.create_optimizer()
        trainer.model.train()
        prepare, spent = trainer._prepare_batch_inputs, [0.0]

        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            found = prepare(*args)
            spent.append(time.perf_counter() - started)
            return found

        trainer._prepare_batch_inputs = timed

        def work() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
            trainer._buffered_inputs = None
            for trainer._step in range(slices):
                trainer.accelerator.gradient_state._set_sync_gradients(trainer._step == slices - 1)
                trainer.training_step(trainer.model, [])
            return {"old_logprobs_seconds": round(spent[-1], 2)}, gradient_of(trainer.model)

        libraries = {"ms-swift": "ms_swift", "trl": "trl", "transformers": "transformers", "torch": "torch"}
        serve({name: version(package) for name, package in libraries.items()}, folder, work)


def samples(rollouts: dict[str, Any]) -> list[GRPOSample]:
    """Return the rollouts as ms-swift has them after generation."""
    return [
        GRPOSample(
            messages=[
                {"role": "user", "content": " ".join(f"<{token}>" for token in prompt)},
                {"role": "assistant", "content": " ".join(f"<{token}>" for token in completion)},
            ],
            response_token_ids=[completion],
            finish_reason="stop",
            prompt_id=str(row // rollouts["group"]),
            request_id=str(row),
        )
        for row, (prompt, completion) in enumerate(zip(rollouts["prompts"], rollouts["completions"], strict=True))
    ]


def main() -> None:
    """Serve."""
    folder = Path(sys.argv[1])
    rollouts = json.loads((folder / ROLLOUTS).read_text())
    rows, group = len(rollouts["prompts"]), rollouts["group"]
    data = folder / "swift.jsonl"
    row = json.dumps({"messages": [{"role": "user", "content": "<3>"}]})
    data.write_text(f"{row}\n" * rows)
    options: dict[str, Any] = {
        "rlhf_type": "grpo",
        "model": folder / POLICY,
        "model_type": "llama",
        "template": "dummy",
        "dataset": data,
        "split_dataset_ratio": 0,
        "reward_funcs": "format",
        "tuner_type": "full",
        "torch_dtype": "float32",
        "fp16": "false",
        "bf16": "false",
        "temperature": 1,
        "attn_impl": "sdpa",
        "use_vllm": "false",
        "num_generations": group,
        "per_device_train_batch_size": group,
        "gradient_accumulation_steps": rows // group,
        "gradient_checkpointing": "false",
        "loss_type": "dapo",
        "beta": 0,
        "max_completion_length": 256,
        "max_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "output_dir": folder / "swift",
    }
    Served([part for name, value in options.items() for part in (f"--{name}", str(value))]).main()


if __name__ == "__main__":
    main()
