"""The update with verl's prefix grouper, in an environment that has verl and prefix_grouper; see `benchmarks.peers`.

No engine of verl 0.9.1 calls it, so that this calls its functions: a group per micro-batch, the prompt once, padded
completions, in float32 and without gradient checkpointing; log-probabilities of the old policy, then the gradient.
Its masks are those of FlashAttention, which a CPU lacks: PyTorch's attention gets the same ones with all dimensions.
"""

import argparse
import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from verl.models.transformers.monkey_patch import apply_prefix_grouper_patch
from verl.trainer.ppo.prefix_grouper_utils import build_pg_from_micro_batch, pg_forward

from benchmarks.peers.turns import POLICY, ROLLOUTS, gradient_of, serve

PADDING = 1
SDPA = ALL_ATTENTION_FUNCTIONS["sdpa"]


def with_whole_masks(module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **options: Any) -> Any:
    """Attend causally, queries at the end of the keys; `mask` is 1 for keys that count, (sequences, keys)."""
    if mask is not None and mask.dim() == 2:
        queries, keys = query.size(2), key.size(2)
        causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        mask = causal & mask[:, None, None].bool()
    return SDPA(module, query, key, value, mask, *args, **options)


def groups_of(rollouts: dict[str, Any]) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """Return the micro-batches, as verl's function takes them, and their advantages by token."""
    size, groups = rollouts["group"], []
    for first in range(0, len(rollouts["prompts"]), size):
        rows = slice(first, first + size)
        prompts, completions = (
            pad_sequence([torch.tensor(row) for row in rollouts[name][rows]], batch_first=True, padding_value=PADDING)
            for name in ("prompts", "completions")
        )
        mask = pad_sequence([torch.ones(len(row), dtype=torch.long) for row in rollouts["completions"][rows]], True)
        batch = {"prompts": prompts, "responses": completions, "response_mask": mask, "uid": [first] * size}
        groups.append((batch, torch.tensor(rollouts["advantages"][rows])[:, None] * mask))
    return groups


def log_probs_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Return the log-probabilities of completions, with those of a group's prompt computed once."""
    grouper, ids, mask, positions, completions, completion_mask = build_pg_from_micro_batch(batch, PADDING)
    return pg_forward(model, grouper, ids, mask, positions, completions, completion_mask)[0]


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    ALL_ATTENTION_FUNCTIONS["sdpa"] = with_whole_masks
    apply_prefix_grouper_patch()
    model = AutoModelForCausalLM.from_pretrained(
        args.folder / POLICY, dtype=torch.float32, attn_implementation="sdpa"
    ).train()
    groups = groups_of(json.loads((args.folder / ROLLOUTS).read_text()))
    tokens = sum(int(batch["response_mask"].sum()) for batch, _ in groups)

    def work() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        started = time.perf_counter()
        with torch.no_grad():
            old = [log_probs_of(model, batch) for batch, _ in groups]
        scored = time.perf_counter() - started
        for (batch, advantages), before in zip(groups, old, strict=True):
            ratio = torch.exp(log_probs_of(model, batch) - before)
            (-(ratio * advantages)[batch["response_mask"].bool()].sum() / tokens).backward()
        return {"old_logprobs_seconds": round(scored, 2)}, gradient_of(model)

    serve({name: version(name) for name in ("verl", "prefix_grouper", "transformers", "torch")}, args.folder, work)


if __name__ == "__main__":
    main()
