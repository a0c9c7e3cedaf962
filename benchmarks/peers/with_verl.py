"""verl's update, in an environment that has verl; see `benchmarks.peers`.

Its FSDP engine, with a single process, in float32 and without gradient checkpointing, computes the log-probabilities of
the old policy and then the gradient, as verl's trainer asks it to. The environment is `benchmarks.peers.__main__.VERL`.
"""

import argparse
import json
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils.tensordict_utils import assign_non_tensor
from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.fsdp import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from benchmarks.peers.turns import POLICY, ROLLOUTS, gradient_of, serve


def batch_of(rollouts: dict[str, Any]) -> TensorDict:
    """Return rollouts as verl's engine takes them: sequences without padding, masks and advantages with it."""
    prompts, completions = ([torch.tensor(row) for row in rollouts[name]] for name in ("prompts", "completions"))
    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    whole = [torch.cat(pair) for pair in zip(prompts, completions, strict=True)]
    ones = [torch.ones(len(row), dtype=torch.long) for row in completions]
    mask = torch.nn.utils.rnn.pad_sequence(ones, batch_first=True)
    return TensorDict(
        {
            "input_ids": nested(whole),
            "position_ids": nested([torch.arange(len(row)) for row in whole]),
            "prompts": nested(prompts),
            "responses": nested(completions),
            "response_mask": mask,
            "loss_mask": mask,
            "temperature": torch.ones(len(whole)),
            "advantages": torch.tensor(rollouts["advantages"])[:, None] * mask,
        },
        batch_size=len(whole),
    )


def engine_of(folder: Path, padded: bool) -> Any:
    """Return verl's engine with the policy."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/verl-{padded}", rank=0, world_size=1)
    in_float32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = FSDPEngineWithLMHead(
        HFModelConfig(
            path=str(folder / POLICY),
            load_tokenizer=False,
            override_config={"attn_implementation": "sdpa"},
            enable_gradient_checkpointing=False,
            use_remove_padding=not padded,
        ),
        FSDPEngineConfig(strategy="fsdp2", model_dtype="fp32", mixed_precision=in_float32, use_torch_compile=False),
        FSDPOptimizerConfig(lr=1e-6, total_training_steps=1),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("tokens", type=int, help="per micro-batch")
    parser.add_argument("--padded", action="store_true", help="a padded batch instead of a packed sequence")
    args = parser.parse_args()
    engine = engine_of(args.folder, args.padded)
    rollouts = json.loads((args.folder / ROLLOUTS).read_text())
    actor = ActorConfig(strategy="fsdp2", rollout_n=rollouts["group"], use_dynamic_bsz=True)
    options = {"use_dynamic_bsz": True, "max_token_len_per_gpu": args.tokens, "use_remove_padding": not args.padded}

    def work() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        batch, started = batch_of(rollouts), time.perf_counter()
        longest = batch["response_mask"].size(1)
        assign_non_tensor(batch, **options, max_response_len=longest, calculate_entropy=True)
        with engine.eval_mode():
            scored = engine.forward_backward_batch(batch, None, forward_only=True)["model_output"]
        batch["old_log_probs"] = no_padding_2_padding(scored["log_probs"], batch)
        old = time.perf_counter() - started
        assign_non_tensor(batch, calculate_entropy=False, global_batch_size=len(batch))
        with engine.train_mode():
            engine.forward_backward_batch(batch, partial(ppo_loss, actor))
            gradient = gradient_of(engine.module)
        return {"old_logprobs_seconds": round(old, 2)}, gradient

    serve({name: version(name) for name in ("verl", "transformers", "torch")}, args.folder, work)


if __name__ == "__main__":
    main()
