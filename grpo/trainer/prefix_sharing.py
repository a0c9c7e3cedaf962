"""Rows of one prompt as one sequence: the prompt once, then its completions, none of which sees another.

A policy whose layers are attention over all earlier tokens, with positions given by rotation, computes the same for a
completion whether its prompt stands before it alone or before others too, if the mask hides these and its positions
begin where the prompt ends. The prompt's last token is repeated before each completion, because it predicts its first
token; the completion's last token predicts nothing and is dropped.
"""

from typing import Any, NamedTuple

import torch

# Architectures of rotary positions and causal attention, full in every layer that does not say otherwise.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3")


class Packed(NamedTuple):
    """What goes through the policy: S sequences of T tokens, for B rows with C completion tokens at the most."""

    input_ids: torch.Tensor
    """(S, T)"""
    position_ids: torch.Tensor
    """(S, T)"""
    labels: torch.Tensor
    """The token that each token predicts, -100 where that is none of a completion, (S, T)."""
    mask: torch.Tensor
    """Which token sees which, (S, 1, T, T), true where it does."""
    index: torch.Tensor
    """Where the prediction of each completion token is, among S x T, (B, C)."""


def can_share(model: Any) -> bool:
    """Tell whether a policy computes the same for shared prompts."""
    config = model.config
    layers = getattr(config, "layer_types", None) or ["full_attention"]
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return (
        config.model_type in ARCHITECTURES
        and set(layers) == {"full_attention"}
        and rotation not in ("dynamic", "longrope")  # by the length of the whole sequence
        and config._attn_implementation == "sdpa"  # others do not take the mask
        and not getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
    )


def pack_rows(
    prompt_ids: torch.Tensor, prompt_mask: torch.Tensor, completion_ids: torch.Tensor, completion_mask: torch.Tensor
) -> Packed:
    """Lay out rows (B, P) and (B, C) so that consecutive rows with equal prompts share a sequence."""
    width = completion_ids.size(1)
    completion_lengths = completion_mask.sum(1).tolist()
    sequences: list[dict[str, list[int]]] = []
    places: list[tuple[int, int]] = []
    last = None
    for row, prompt in enumerate(real_tokens(prompt_ids, prompt_mask)):
        if prompt != last:
            last = prompt
            before = prompt[:-1]
            sequences.append(
                {
                    "ids": list(before),
                    "positions": list(range(len(before))),
                    "labels": [-100] * len(before),
                    "part": [0] * len(before),
                }
            )
        sequence = sequences[-1]
        places.append((len(sequences) - 1, len(sequence["ids"])))
        completion = completion_ids[row, : completion_lengths[row]].tolist()
        sequence["ids"] += [prompt[-1], *completion[:-1]]
        sequence["positions"] += range(len(prompt) - 1, len(prompt) - 1 + len(completion))
        sequence["labels"] += completion
        sequence["part"] += [row + 1] * len(completion)
    length = max(len(sequence["ids"]) for sequence in sequences)

    def tensor(name: str, padding: int) -> torch.Tensor:
        rows = [sequence[name] + [padding] * (length - len(sequence[name])) for sequence in sequences]
        return torch.tensor(rows, device=prompt_ids.device)

    part = tensor("part", -1)
    order = torch.arange(length, device=part.device)
    earlier = order[None, :, None] >= order[None, None, :]
    visible = (part[:, None, :] == 0) | (part[:, None, :] == part[:, :, None])
    starts = torch.tensor([sequence * length + start for sequence, start in places], device=part.device)
    within = torch.arange(width, device=part.device)
    index = (starts[:, None] + within).clamp(max=part.numel() - 1)
    return Packed(tensor("ids", 0), tensor("positions", 0), tensor("labels", -100), (earlier & visible)[:, None], index)


def real_tokens(ids: torch.Tensor, mask: torch.Tensor) -> list[tuple[int, ...]]:
    """Return each row's tokens without padding."""
    return [
        tuple(token for token, real in zip(row, keep, strict=True) if real)
        for row, keep in zip(ids.tolist(), mask.tolist(), strict=True)
    ]


def score(
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probability and entropy of each completion token, (rows, logits_to_keep), zero where there is none.

    The arguments are those of `GRPOTrainer._get_per_token_logps_and_entropies`. A reference has no entropy.
    """
    prompt = input_ids.size(1) - logits_to_keep
    completion_mask = attention_mask[:, prompt:]
    packed = pack_rows(input_ids[:, :prompt], attention_mask[:, :prompt], input_ids[:, prompt:], completion_mask)
    outputs = model(
        input_ids=packed.input_ids,
        attention_mask=packed.mask,
        position_ids=packed.position_ids,
        shift_labels=packed.labels,
        fused_lm_head=True,
    )
    logps, entropies = (
        None if values is None else values.flatten()[packed.index].masked_fill(completion_mask == 0, 0)
        for values in (outputs.log_probs, outputs.entropy)
    )
    return logps, entropies
