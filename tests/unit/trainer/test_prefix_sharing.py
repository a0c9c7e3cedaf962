"""Rows that share a prompt, against the same rows on their own."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PromptTuningConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer import add_fused_lm_head

from grpo.trainer.microbatch import pack
from grpo.trainer.prefix_sharing import ARCHITECTURES, can_share, pack_rows, score

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}


def padded(rows: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Prompts on the left, completions on the right, as TRL has them: ids, mask and completion width."""
    prompt_width, width = max(len(prompt) for prompt, _ in rows), max(len(completion) for _, completion in rows)
    ids = torch.zeros(len(rows), prompt_width + width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(rows):
        place = slice(prompt_width - len(prompt), prompt_width + len(completion))
        ids[row, place] = torch.tensor(prompt + completion)
        mask[row, place] = 1
    return ids, mask, width


ROWS = [([5, 6, 7, 8], [9, 10]), ([5, 6, 7, 8], [11]), ([5, 6, 7, 8], [9, 12, 13, 14]), ([3], [4, 5]), ([3], [6])]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_shared_prompts_change_neither_scores_nor_gradients(architecture: str, checkpointing: bool) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **SIZES)).train()
    assert can_share(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    ids, mask, width = padded(ROWS)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-width] = -100
    found = []
    for shared in (False, True):
        if shared:
            logps, entropies = score(model, ids, mask, width)
            assert entropies is not None
        else:
            outputs = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
            logps, entropies = outputs.log_probs[:, -width:], outputs.entropy[:, -width:]
        (logps * torch.arange(1, width + 1) + entropies).sum().backward()
        found.append((logps, entropies, [p.grad.clone() for p in model.parameters()]))
        model.zero_grad()
    plain, with_prompts_shared = found
    torch.testing.assert_close(with_prompts_shared[:2], plain[:2])
    for mine, stock in zip(with_prompts_shared[2], plain[2], strict=True):
        torch.testing.assert_close(mine, stock, rtol=1e-4, atol=1e-4)
    assert not with_prompts_shared[0][mask[:, -width:] == 0].any()


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("gpt2", {"n_layer": 1, "n_embd": 12}),
        ("qwen2", {**SIZES, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4}),
        ("llama", {**SIZES, "attn_implementation": "eager"}),
        ("llama", {**SIZES, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}}),
    ],
)
def test_policies_that_would_compute_something_else_do_not_share(architecture: str, options: dict[str, Any]) -> None:
    assert not can_share(AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **options)))


def test_prompt_learning_does_not_share() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    assert not can_share(get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)))


PROMPT = st.sampled_from([(5, 6, 7), (5, 6, 8), (9,)])
COMPLETIONS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@settings(deadline=None)
@given(st.lists(st.tuples(PROMPT, COMPLETIONS), min_size=1, max_size=6))
def test_a_completion_sees_its_prompt_and_itself_alone(
    rows: list[tuple[tuple[int, ...], list[int]]],
) -> None:
    rows.sort(key=lambda row: row[0])
    ids, mask, width = padded([(list(prompt), completion) for prompt, completion in rows])
    packed = pack_rows(ids[:, :-width], mask[:, :-width], ids[:, -width:], mask[:, -width:])
    length = packed.input_ids.size(1)
    for row, (prompt, completion) in enumerate(rows):
        text = [*prompt, *completion]
        for place, token in enumerate(completion):
            sequence, within = divmod(int(packed.index[row, place]), length)
            seen = packed.mask[sequence, 0, within]
            assert packed.input_ids[sequence][seen].tolist() == text[: len(prompt) + place]
            assert packed.position_ids[sequence][seen].tolist() == list(range(len(prompt) + place))
            assert packed.labels[sequence, within] == token
    assert int((packed.labels != -100).sum()) == sum(len(completion) for _, completion in rows)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60)), min_size=1, max_size=30),
    st.integers(1, 400),
    st.integers(0, 64),
)
def test_shared_microbatches_hold_each_row_once_in_the_budget(
    rows: list[tuple[str, int]], budget: int, hidden_size: int
) -> None:
    prompts = [{"a": 40, "b": 10, "c": 1}[prompt] for prompt, _ in rows]
    completions = [completion for _, completion in rows]
    parts = pack(prompts, completions, budget, prompts=[prompt for prompt, _ in rows], hidden_size=hidden_size)
    assert sorted(row for part in parts for row in part.rows) == list(range(len(rows)))
    assert all(part.tokens <= budget or part.sequences[0] == 1 for part in parts)
    for part in parts:
        if part.shared:
            real = sum(completions[row] for row in part.rows)
            kinds = {rows[row][0] for row in part.rows}
            assert part.tokens >= real + sum({"a": 39, "b": 9, "c": 0}[kind] for kind in kinds)
            assert part.prompt_length == max(prompts[row] for row in part.rows)


def test_prompts_are_shared_only_where_that_is_cheaper() -> None:
    prompts = ["a"] * 8
    assert all(part.shared for part in pack([500] * 8, [50] * 8, 4000, prompts=prompts, hidden_size=576))
    assert not any(part.shared for part in pack([50] * 8, [2000] * 8, 20_000, prompts=prompts, hidden_size=576))
    assert not any(part.shared for part in pack([500] * 8, [50] * 8, 4000, prompts=list("abcdefgh"), hidden_size=576))
