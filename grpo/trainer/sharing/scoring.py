"""Log-probabilities of completions that share their prompts, and the images of these, in one sequence."""

from typing import Any

import torch

from grpo.trainer.batch import FIELDS, Batch, as_batch, pick
from grpo.trainer.sharing.attention import grouped, policy_of, shared_attention
from grpo.trainer.sharing.layout import Packed, pack_rows, prompt_keys

COUNTS = ("num_images", "num_tiles")
"""Fields that TRL divides images by, which no model takes."""


def score(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, **fields: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probability and entropy of each completion token, (rows, logits_to_keep), zero where there is none.

    The arguments are those of `GRPOTrainer._get_per_token_logps_and_entropies`. A reference has no entropy.
    """
    batch = as_batch(input_ids, attention_mask, logits_to_keep)
    batch |= {name: value for name, value in fields.items() if value is not None}
    mask = batch["completion_mask"]
    packed = pack_rows(prompt_keys(batch), batch["prompt_mask"], batch["completion_ids"], mask)
    inputs = {name: batch[name] for name in batch if FIELDS[name].of == "sequence"}
    inputs = {name: value.flatten()[packed.source] for name, value in (inputs | {"input_ids": input_ids}).items()}
    inputs["position_ids"] = packed.position_ids
    if any(FIELDS[name].of == "images" for name in batch):
        prompts = pick(batch, packed.first)
        inputs |= {name: prompts[name] for name in prompts if FIELDS[name].of == "images"}
        inputs["position_ids"] = positions_in_space(model, prompts, packed)
    with shared_attention(model), grouped(packed.groups):
        outputs = model(
            attention_mask=torch.ones_like(packed.labels),
            shift_labels=packed.labels,
            fused_lm_head=True,
            **inputs,
        )
    logps, entropies = (
        None if values is None else values.flatten()[packed.index].masked_fill(mask == 0, 0)
        for values in (outputs.log_probs, outputs.entropy)
    )
    return logps, entropies


def positions_in_space(model: Any, prompts: Batch, packed: Packed) -> torch.Tensor:
    """Return the positions of all tokens, (3, 1, T), where images have time, height and width; others as they are.

    A model of the Qwens' computes those of prompts. A completion continues after the largest of its prompt.
    """
    inner = policy_of(model).base_model
    if not hasattr(inner, "get_rope_index") or "mm_token_type_ids" not in prompts:
        return packed.position_ids
    ids, mask = prompts["prompt_ids"], prompts["prompt_mask"]
    kinds = prompts["mm_token_type_ids"][:, : ids.size(1)]
    grid = prompts.get("image_grid_thw")
    found, _ = inner.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grid, attention_mask=mask)
    parts = []
    for place, group in enumerate(packed.groups):
        prompt = found[:, place, mask[place] != 0]
        parts.append(prompt[:, :-1])
        after = prompt.max() + torch.arange(max(group.completions), device=ids.device)
        after = torch.cat((prompt[:, -1:], after[1:].expand(3, -1)), 1)
        parts += [after[:, :length] for length in group.completions]
    return torch.cat(parts, 1)[:, None]
