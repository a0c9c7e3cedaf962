"""Log-probabilities of completions that share their prompts, and the images of these, in one sequence."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from grpo.trainer import trl
from grpo.trainer.batch import FIELDS, as_batch
from grpo.trainer.microbatch import PromptGroup
from grpo.trainer.shared_prompts.attention import grouped, shared_attention
from grpo.trainer.shared_prompts.layout import Packed, pack_rows
from grpo.utils.attention import policy_of


def score(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    groups: Sequence[PromptGroup],
    attended: list[Any] | None = None,
    compute_aux_loss: bool = False,
    **fields: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return log-probability and entropy of each completion token, (rows, logits_to_keep), zero where there is none.

    The third is the loss of routers, if it is wanted.

    The arguments are those of `GRPOTrainer._get_per_token_logps_and_entropies`, but for the images, which are those of
    the prompts of the groups. A reference has no entropy.

    Args:
        model: the policy, or its reference.
        input_ids: prompts padded on the left and completions padded on the right, (rows, P + C).
        attention_mask: of these.
        logits_to_keep: C.
        groups: all rows, in their order.
        attended: gets the layers that attend, see `grouped`.
        fields: tensors of images, and of kinds of tokens.
    """
    fields = {name: value for name, value in fields.items() if value is not None}
    rows = as_batch(input_ids, attention_mask, logits_to_keep)
    width = rows["prompt_ids"].size(1)
    packed = pack_rows(groups, width, logits_to_keep, input_ids.device, with_last=compute_aux_loss)
    kinds = {name: value for name, value in fields.items() if FIELDS[name].of == "sequence"}
    inputs = {name: value.flatten()[packed.source] for name, value in (kinds | {"input_ids": input_ids}).items()}
    inputs |= {name: value for name, value in fields.items() if FIELDS[name].of == "images"}
    inputs["position_ids"] = packed.position_ids
    if "image_grid_thw" in inputs and "mm_token_type_ids" in inputs:
        inputs["position_ids"] = positions_in_space(model, rows | fields, packed)
    with (
        shared_attention(model),
        grouped(packed.groups, attended),
        hidden_states_of(model, packed.scored),
        trl.head_scores(only_labels=False),  # as it gets no others
    ):
        outputs = model(
            attention_mask=torch.ones_like(packed.source),
            shift_labels=input_ids.flatten()[packed.targets][None],
            fused_lm_head=True,
            **inputs,
            **({"output_router_logits": True} if compute_aux_loss else {}),
        )
    shape = rows["completion_ids"].shape
    logps, entropies = (
        None if values is None else values.new_zeros(shape.numel()).index_copy(0, packed.places, values[0]).view(shape)
        for values in (outputs.log_probs, outputs.entropy)
    )
    return logps, entropies, outputs.aux_loss


@contextmanager
def hidden_states_of(model: Any, places: torch.Tensor) -> Iterator[None]:
    """While inside, the head of a policy sees the hidden states of these places of its sequence, (N), and no others."""

    def select(backbone: torch.nn.Module, arguments: Any, outputs: Any) -> None:
        outputs.last_hidden_state = outputs.last_hidden_state.index_select(1, places)

    handle = policy_of(model).base_model.register_forward_hook(select)
    try:
        yield
    finally:
        handle.remove()


def positions_in_space(model: Any, rows: dict[str, torch.Tensor], packed: Packed) -> torch.Tensor:
    """Return the positions of all tokens, (3, 1, T), where images have time, height and width; others as they are.

    A model of the Qwens' computes those of prompts. A completion continues after the largest of its prompt.
    """
    inner = policy_of(model).base_model
    if not hasattr(inner, "get_rope_index"):
        return packed.position_ids
    ids, mask = (rows[name][packed.first] for name in ("prompt_ids", "prompt_mask"))
    kinds = rows["mm_token_type_ids"][packed.first, : ids.size(1)]
    grid = rows["image_grid_thw"]
    positions, _ = inner.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grid, attention_mask=mask)
    parts = []
    for place, group in enumerate(packed.groups):
        prompt = positions[:, place, mask[place] != 0]
        parts.append(prompt[:, :-1])
        after = prompt.max() + torch.arange(max(group.completions), device=ids.device)
        after = torch.cat((prompt[:, -1:], after[1:].expand(3, -1)), 1)
        parts += [after[:, :length] for length in group.completions]
    return torch.cat(parts, 1)[:, None]
