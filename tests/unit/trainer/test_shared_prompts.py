"""Rows that share a prompt, against the same rows on their own."""

import copy
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import (
    HRAConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    MissConfig,
    OFTConfig,
    PromptTuningConfig,
    get_peft_model,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from trl.trainer import add_fused_lm_head

from grpo.model.image_features import keep_image_features
from grpo.trainer.batch import as_batch, images_of, take
from grpo.trainer.microbatch import Microbatch, PromptGroup, pack
from grpo.trainer.placement import show_to_trl
from grpo.trainer.shared_prompts import attention, merged, trial, varlen
from grpo.trainer.shared_prompts.attention import SHORT, GroupMask, grouped, shared_attention
from grpo.trainer.shared_prompts.layout import Group, groups_of, pack_rows
from grpo.trainer.shared_prompts.merged import is_exact
from grpo.trainer.shared_prompts.scoring import score
from grpo.trainer.shared_prompts.trial import text_rows, why_not
from grpo.trainer.shared_prompts.varlen import segments_of
from tests.flash_kernel import Kernel
from tests.hybrids import HYBRIDS, NOT_CONTINUED

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
WINDOW = {"sliding_window": 4}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CHUNKS = {"attention_chunk_size": 4, "layer_types": ["chunked_attention", "full_attention", "chunked_attention"]}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
LATENT |= {"v_head_dim": 8, "head_dim": 4}
CPU = torch.device("cpu")
EAGER = {"attn_implementation": "eager"}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, eager": ("llama", EAGER),
    "llama, a key for each query": ("llama", {"num_key_value_heads": 4}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "smollm3": ("smollm3", {}),
    "mistral": ("mistral", WINDOW),
    "mistral, eager": ("mistral", WINDOW | EAGER),
    "ministral": ("ministral", MIXED),
    "gemma2, soft caps": ("gemma2", {**MIXED, **EAGER, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
    "gemma3": ("gemma3_text", {**MIXED, "query_pre_attn_scalar": 8}),
    "phi3": ("phi3", WINDOW),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    "glm4": ("glm4", {}),
    "starcoder2": ("starcoder2", WINDOW),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", MIXED),
    "gpt_oss, attention sinks": ("gpt_oss", {**MIXED, **EAGER, **EXPERTS}),
    "llama4, chunks": ("llama4_text", {**CHUNKS, "moe_layers": [], "intermediate_size_mlp": 64}),
    "deepseek_v3, latent attention": ("deepseek_v3", {**LATENT, "first_k_dense_replace": 3}),
}
IN_TWO_CALLS = ["mistral", *list(FAMILIES)[-3:], "gemma2, soft caps"]
"""Policies whose attention PyTorch's kernels cannot merge."""

QUICK = ("qwen3_5_text", "lfm2", "falcon_h1")
"""Hybrids of which the quick tests know gated DeltaNet, convolutions, and Mamba 2 beside attention."""


def policy(architecture: str, **options: Any) -> Any:
    """A random policy, in training."""
    torch.manual_seed(0)
    sizes = {} if architecture == "gpt2" else SIZES
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **{**sizes, **options})).train()
    show_to_trl(model)
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    return model


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


ROWS = [
    ([5, 6, 7, 8, 9, 10], [9, 10, 3, 4, 5, 6]),
    ([5, 6, 7, 8, 9, 10], [11]),
    ([5, 6, 7, 8, 9, 10], [9, 12, 13, 14]),
    ([3], [4, 5]),
    ([3], [6]),
    ([7, 8, 9], [4, 5, 6, 7, 8, 9, 10]),
]
"""Prompts of different lengths, some shorter than a window."""


def alone(model: Any, ids: torch.Tensor, mask: torch.Tensor, width: int, **options: Any) -> tuple[torch.Tensor, ...]:
    """Log-probabilities and entropies as TRL computes them."""
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-width] = -100
    images = {name: value for name, value in options.items() if isinstance(value, torch.Tensor)}
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True, **images)
    return outputs.log_probs[:, -width:], outputs.entropy[:, -width:]


def shared_scores(
    sizes: Sequence[int], model: Any, ids: torch.Tensor, mask: torch.Tensor, width: int, **images: Any
) -> tuple[torch.Tensor, ...]:
    """Log-probabilities and entropies of groups of so many rows, which share their prompts."""
    return score(model, ids, mask, width, groups_of(sizes, mask[:, :-width], mask[:, -width:]), **images)[:2]


def results(model: Any, function: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities, entropies and the gradient of a weighted sum of them."""
    ids, mask, width = padded(ROWS)
    with shared_attention(model):
        logps, entropies = function(model, ids, mask, width)[:2]
        (logps * torch.arange(1, width + 1) + entropies).sum().backward()
    gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    model.zero_grad()
    return logps.detach(), entropies.detach(), torch.cat([part.flatten() for part in gradient])


@pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(of, marks=() if of in QUICK else pytest.mark.slow) for of in HYBRIDS)]
)
def test_shared_prompts_change_neither_scores_nor_gradients(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short groups are attended in one call, with a mask; longer ones part by part."""
    architecture, options = FAMILIES.get(family) or (family, HYBRIDS[family])
    model = policy(architecture, **options)
    before = model.config._attn_implementation
    assert why_not(model, text_rows(model, CPU), alone) == (None, None)
    plain = results(model, alone)
    for checkpointing in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
            model.enable_input_require_grads()
        for short in (SHORT, 0):
            monkeypatch.setattr("grpo.trainer.shared_prompts.attention.SHORT", short)
            is_exact.cache_clear()  # the kernels are tried within the first layer, which may be a checkpointed one
            shared = results(model, partial(shared_scores, [3, 2, 1]))
            torch.testing.assert_close(shared[:2], plain[:2], rtol=1e-5, atol=2e-5)
            assert (shared[2] - plain[2]).norm() <= 1e-5 * plain[2].norm()
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("family", IN_TWO_CALLS)
def test_attention_has_two_calls_whatever_the_group(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, options = FAMILIES[family]
    model = policy(architecture, **options)
    calls: list[Mock] = []

    def counted(name: str, eager: Any) -> Mock:
        calls.append(Mock(wraps=ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)))
        return calls[-1]

    monkeypatch.setattr(attention, "ALL_ATTENTION_FUNCTIONS", Mock(get_interface=counted))
    for completions in (2, 6):
        ids, mask, width = padded([([5, 6, 7, 8, 9, 10], [11 + place, 12]) for place in range(completions)])
        calls.clear()
        with shared_attention(model), torch.no_grad():
            shared_scores([completions], model, ids, mask, width)
        assert [call.call_count for call in calls] == [2] * model.config.num_hidden_layers


@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2"])
def test_rows_on_a_gpu_are_bounded_by_their_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def as_rows(group: Group, device: str = "cuda") -> bool:
        options = {"device": torch.device(device), "allow_is_causal_skip": True}
        with patch.object(GroupMask, "rows"), patch.object(attention, "layout_on"):
            return GroupMask(name, [group], Mock(), options, None).as_rows

    assert as_rows(Group(0, 300, (40, 80))) == (name != "flash_attention_2")
    assert not as_rows(Group(0, 300, (40, 80)), "cpu")
    for largest in (300 * 300, 2 * 180 * 480):  # of the prompt, and of the completions
        group = Group(0, 300, (40, 80 if largest == 300 * 300 else 180))
        monkeypatch.setattr(attention, "LARGEST_MASK", largest)
        assert as_rows(group) == (name != "flash_attention_2")
        monkeypatch.setattr(attention, "LARGEST_MASK", largest - 1)
        assert not as_rows(group)


@pytest.mark.parametrize("family", ["llama", "llama, a key for each query", "qwen3", "olmo2", "granite"])
def test_the_two_calls_of_a_gpu_change_nothing_either(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel stands here as its formula."""
    architecture, options = FAMILIES[family]
    model = policy(architecture, **options)
    plain = results(model, alone)
    calls = Mock(wraps=varlen.forward)
    monkeypatch.setattr(varlen, "aten", Kernel)
    monkeypatch.setattr(merged, "forward_on_cpu", calls)
    monkeypatch.setattr(merged, "backward_on_cpu", varlen.backward)
    for module in (merged, attention):
        monkeypatch.setattr(module, "layout_on", lambda device, groups: segments_of(groups, device))
    monkeypatch.setattr(attention, "SHORT", 0)
    for checkpointing in (None, {"use_reentrant": False}, {"use_reentrant": True}):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
            model.enable_input_require_grads()
        is_exact.cache_clear()
        calls.reset_mock()
        shared = results(model, partial(shared_scores, [3, 2, 1]))
        assert calls.call_count == 1 + (1 + bool(checkpointing)) * model.config.num_hidden_layers, "with the trial"
        torch.testing.assert_close(shared[:2], plain[:2], rtol=1e-5, atol=2e-5)
        assert (shared[2] - plain[2]).norm() <= 1e-5 * plain[2].norm()
    is_exact.cache_clear()


TOWER = {"hidden_size": 32, "intermediate_size": 32, "patch_size": 4, "initializer_range": 0.3}
BY_TILE = {**TOWER, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}
WITH_IMAGES: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        "vision_config": {**TOWER, "depth": 2, "num_heads": 2, "temporal_patch_size": 2, "out_hidden_size": 32}
        | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}},
    },
    "gemma3": {
        "vision_config": BY_TILE,
        "text_config": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
        "mm_tokens_per_image": 4,
    },
    "smolvlm": {"vision_config": BY_TILE, "text_config": {"model_type": "llama"}, "scale_factor": 2},
    "idefics3": {"vision_config": BY_TILE, "text_config": {"model_type": "llama"}, "scale_factor": 2},
}
"""Families beside those of `tests.vision_policies`. Gemma's image tokens see each other in both directions."""


def images_of_rows(family: str, ids: torch.Tensor) -> dict[str, Any]:
    """Two images, of the first two rows and of the last two, as the family's processor and TRL give them."""
    kinds = (ids == IMAGE).int()
    if family == "qwen3_vl":
        pixels = torch.randn(2, 16, 96)[[0, 0, 1, 1]].flatten(0, 1)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]] * 4), "mm_token_type_ids": kinds}
    pixels = torch.randn(2, 3, 16, 16)[[0, 0, 1, 1]]
    if family == "gemma3":
        return {"pixel_values": pixels, "token_type_ids": kinds}
    return {"pixel_values": pixels[:, None], "pixel_attention_mask": torch.ones(4, 1, 16, 16, dtype=torch.bool)}


IMAGE = 50


@pytest.mark.parametrize("family", WITH_IMAGES)
def test_images_of_shared_prompts_are_computed_once_and_alike(family: str) -> None:
    torch.manual_seed(0)
    config = copy.deepcopy(WITH_IMAGES[family])
    config["text_config"] = {**SIZES, "num_hidden_layers": 2, "vocab_size": 60, "head_dim": 16} | config["text_config"]
    tokens = {f"image_token_{'index' if family == 'gemma3' else 'id'}": IMAGE, "vision_start_token_id": 52}
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(family, **config, **tokens)).train()
    show_to_trl(model)
    add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
    shown = [52, IMAGE, IMAGE, IMAGE, IMAGE, 53]
    prompts = (
        [3, 4, *shown, 5, 6],
        [3, 4, *shown, 5, 6],
        [8, 9, 3, 5, *shown, 7, 5, 6, 3],
        [8, 9, 3, 5, *shown, 7, 5, 6, 3],
    )
    ids, mask, width = padded(list(zip(prompts, [[3, 4, 5, 6], [7, 8], [9], [10, 11, 12]], strict=True)))
    images = images_of_rows(family, ids)
    patches: list[int] = []
    tower = next(
        module
        for name, module in model.named_modules()
        if name.endswith("patch_embed" + "ding" * (family != "qwen3_vl"))
    )
    tower.register_forward_pre_hook(
        lambda module, args, kwargs: patches.append((*args, *kwargs.values())[0].size(0)), with_kwargs=True
    )
    found = []
    batch = {**as_batch(ids, mask, width), **images, "num_images": [1] * 4}
    groups = groups_of([2, 2], mask[:, :-width], mask[:, -width:])
    once = images_of(take(batch, Microbatch((0, 1, 2, 3), ids.size(1) - width, width, groups=groups)))
    for function, given_images in ((alone, images), (partial(shared_scores, [2, 2]), once)):
        logps, entropies = function(model, ids, mask, width, **given_images)[:2]
        logps, entropies = (values.masked_fill(mask[:, -width:] == 0, 0) for values in (logps, entropies))
        (logps * torch.arange(1, width + 1) + entropies).sum().backward()
        gradient = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        found.append((logps.detach(), entropies.detach(), torch.cat([part.flatten() for part in gradient])))
        model.zero_grad()
    plain, shared = found
    torch.testing.assert_close(shared[:2], plain[:2], rtol=1e-5, atol=2e-5)
    assert (shared[2] - plain[2]).norm() <= 1e-5 * plain[2].norm()
    assert patches[0] == 2 * patches[1]
    for name, weight in model.named_parameters():
        weight.requires_grad_("language_model" in name or "text_model" in name)
    keep_image_features(model, most=2)
    for _ in range(2):  # the first time also as before, for comparison
        kept = shared_scores([2, 2], model, ids, mask, width, **once)
        torch.testing.assert_close(kept, shared[:2], rtol=1e-5, atol=2e-5)
    assert sum(patches[2:]) == 2 * patches[1]


@pytest.mark.parametrize(
    ("architecture", "options", "reason"),
    [
        *((name, options, "do not continue from a state") for name, options in NOT_CONTINUED.items()),
        ("minimax", EXPERTS | {"layer_types": ["linear_attention", *["full_attention"] * 2]}, "nor keep a state"),
    ],
)
def test_policies_that_would_compute_something_else_are_found(
    architecture: str, options: dict[str, Any], reason: str
) -> None:
    model = policy(architecture, **options)
    padding, sharing = why_not(model, text_rows(model, CPU), alone)
    assert padding is None
    assert reason in str(sharing)


def test_hybrids_share_no_prompts_under_zero3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes would gather the weights of a layer as often as they have lengths of prompts and completions."""
    monkeypatch.setattr(trial, "is_deepspeed_zero3_enabled", lambda: True)
    hybrid, plain = (policy(family, **HYBRIDS.get(family, {})) for family in ("qwen3_5_text", "llama"))
    assert why_not(hybrid, text_rows(hybrid, CPU), alone) == (None, trial.ZERO3)
    assert why_not(plain, text_rows(plain, CPU), alone) == (None, None)


def test_each_layer_has_to_attend() -> None:
    class Recurrent(torch.nn.Module):
        def forward(self, hidden: torch.Tensor, **options: Any) -> torch.Tensor:
            return hidden

    model = policy("llama")
    model.model.layers[1] = Recurrent()
    padding, sharing = why_not(model, text_rows(model, CPU), alone)
    assert padding is None
    assert "1 of its 3 layers do not attend" in str(sharing)


@pytest.mark.parametrize(
    ("architecture", "options", "reason"),
    [
        ("gpt2", {"n_layer": 1, "n_embd": 12, "initializer_range": 0.3}, "padding changes"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}},
            "length of the sequence",
        ),
    ],
)
def test_policies_that_depend_on_padding_are_found(architecture: str, options: dict[str, Any], reason: str) -> None:
    model = policy(architecture, **options)
    assert all(reason in str(found) for found in why_not(model, text_rows(model, CPU), alone))


ADAPTERS: dict[str, Any] = {
    "LoRA": LoraConfig(r=4, init_lora_weights=False),
    "DoRA": LoraConfig(r=4, init_lora_weights=False, use_dora=True),
    "LoHa": LoHaConfig(r=4, init_weights=False),
    "LoKr": LoKrConfig(r=4, init_weights=False),
    "IA3": IA3Config(init_ia3_weights=False, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "OFT": OFTConfig(oft_block_size=8, init_weights=False, use_cayley_neumann=False),
    "HRA": HRAConfig(r=4, init_weights=False),
    "MiSS": MissConfig(r=4, init_weights=False),
    "norms": LNTuningConfig(target_modules=["input_layernorm"]),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_that_act_on_each_token_share_prompts(name: str) -> None:
    config = copy.deepcopy(ADAPTERS[name])
    config.task_type = "CAUSAL_LM"
    config.target_modules = config.target_modules or ["q_proj", "v_proj"]
    model = get_peft_model(policy("llama"), config)
    assert why_not(model, text_rows(model, CPU), alone) == (None, None)


@pytest.mark.parametrize(
    "config",
    [
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2),
        LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[3]),
    ],
)
def test_adapters_that_look_at_other_tokens_do_not(config: Any) -> None:
    """The trial alone would not show it: its tokens do not activate the second one."""
    model = get_peft_model(policy("llama"), config)
    assert all("adapter" in str(reason) for reason in why_not(model, text_rows(model, CPU), alone))


def test_the_trial_leaves_the_policy_as_it_was() -> None:
    model = policy("qwen3_moe", **EXPERTS, attention_dropout=0.5)
    model.model.layers[0].eval()
    before, modes, random = (
        copy.deepcopy(model.state_dict()),
        [m.training for m in model.modules()],
        torch.get_rng_state(),
    )
    assert why_not(model, text_rows(model, CPU), alone) == (None, None)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation returns, numbers."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else [results]:
            if isinstance(result, torch.Tensor):
                self.numbers = max(self.numbers, result.numel())
        return results


def test_memory_grows_with_tokens_and_not_with_their_square() -> None:
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = policy("llama", **sizes, max_position_embeddings=40_000).model  # TRL's head has tiles of a fixed size
    largest = []
    for length in (512, 4096):
        packed = pack_rows([PromptGroup(2 * length, (length,) * 6)], 2 * length, length, CPU)
        inputs = {"input_ids": torch.ones_like(packed.source), "position_ids": packed.position_ids}
        with Largest() as noted, shared_attention(model), grouped(packed.groups):
            model(**inputs, attention_mask=torch.ones_like(packed.source)).last_hidden_state.sum().backward()
        largest.append(noted.numbers / packed.source.numel())
    assert largest[1] <= 1.01 * largest[0] <= 70, "numbers a token; the feed-forward layer has 64"


PROMPT = st.sampled_from([(5, 6, 7), (5, 6, 8), (9,)])
COMPLETIONS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@settings(deadline=None)
@given(st.lists(st.tuples(PROMPT, COMPLETIONS), min_size=1, max_size=6))
def test_a_completion_sees_its_prompt_and_itself_alone(
    rows: list[tuple[tuple[int, ...], list[int]]],
) -> None:
    rows.sort(key=lambda row: row[0])
    ids, mask, width = padded([(list(prompt), completion) for prompt, completion in rows])
    sizes = [len(list(equal)) for _, equal in groupby(prompt for prompt, _ in rows)]
    groups = groups_of(sizes, mask[:, :-width], mask[:, -width:])
    packed = pack_rows(groups, ids.size(1) - width, width, CPU)
    assert ids.flatten()[packed.targets].tolist() == [token for _, completion in rows for token in completion]
    assert (ids[:, -width:].flatten()[packed.places] == ids.flatten()[packed.targets]).all()
    scored = packed.scored.tolist()
    assert [group.start for group in packed.groups] == [0, *(group.end for group in packed.groups[:-1])]
    assert packed.groups[-1].end == packed.source.numel()
    tokens, positions = ids.flatten()[packed.source[0]], packed.position_ids[0]
    row = 0
    for group in packed.groups:
        prompt = range(group.start, group.start + group.prompt)
        begin = prompt.stop
        for length in group.completions:
            text = [*rows[row][0], *rows[row][1]]
            seen = [*prompt, *range(begin, begin + length)]
            assert tokens[seen].tolist() == text[:-1]
            assert positions[seen].tolist() == list(range(len(text) - 1))
            assert scored[:length] == seen[group.prompt :]
            del scored[:length]
            begin, row = begin + length, row + 1
    assert row == len(rows)
    assert not scored


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
    assert all(part.tokens <= budget or len(part) == 1 for part in parts)
    for part in parts:
        if part.shared:
            real = sum(completions[row] for row in part.rows)
            kinds = {rows[row][0] for row in part.rows}
            assert part.tokens >= real + sum({"a": 39, "b": 9, "c": 0}[kind] for kind in kinds)
            seen = [(prompts[row], completions[row]) for row in part.rows]
            assert part.attention <= sum((prompt + completion) ** 2 for prompt, completion in seen)
            assert part.prompt_length == max(prompts[row] for row in part.rows)


def test_prompts_are_shared_only_where_that_is_cheaper() -> None:
    assert all(part.shared for part in pack([500] * 8, [50] * 8, 4000, prompts=["a"] * 8, hidden_size=576))
    assert all(part.shared for part in pack([50] * 8, [2000] * 8, 20_000, prompts=["a"] * 8, hidden_size=576))
    assert not any(part.shared for part in pack([500] * 8, [50] * 8, 4000, prompts=list("abcdefgh"), hidden_size=576))
    assert not any(part.shared for part in pack([500] * 8, [50] * 8, 4000, hidden_size=576))
