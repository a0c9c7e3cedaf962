"""Each component of the memory model against the memory that PyTorch, PEFT and bitsandbytes really take."""

import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from hypothesis import assume, given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.integrations import sdpa_attention

from benchmarks.plan_lines import planned
from benchmarks.simulation import LONG, simulate
from grpo.config.schema import ROOT
from grpo.generation.transformers.continuous_batching import ContinuousBatching, first_equal
from grpo.generation.transformers.growing_cache import CACHE
from grpo.planning.activations import layer_kept
from grpo.planning.adapters import adapted_experts
from grpo.planning.from_config import shipped_models
from grpo.planning.hub_config import shape_of
from grpo.planning.memory import kv_cache, peak, phases, rollout, update
from grpo.planning.persistent import optimizer_state, trained, weights
from grpo.planning.shape import Shape
from grpo.planning.vllm_fraction import copy_of_weights
from grpo.planning.workload import Adapter, Images, Workload
from grpo.trainer.adapter_inputs import keep_inputs_uncast
from grpo.utils.limits import GB

NUMBERS: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 600,
    "tie_word_embeddings": True,
}
SHAPE = shape_of(NUMBERS)
WORKLOAD = Workload(prompt=10, completion=30, sequences=4, tokens=160, completions_per_sequence=1)
LORA = replace(WORKLOAD, adapter=Adapter(16), checkpointing=True, optimizer="adamw_8bit")


def model(numbers: dict[str, Any] = NUMBERS, dtype: torch.dtype = torch.bfloat16) -> Any:
    config = AutoConfig.for_model(**numbers, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def size(tensors: Any) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


# --- Persistent memory ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_take_what_a_models_parameters_take(dtype: torch.dtype) -> None:
    assert weights(SHAPE, replace(WORKLOAD, weight_bytes=dtype.itemsize)) == size(model(dtype=dtype).parameters())


def test_a_4_bit_weight_is_dequantized_where_it_multiplies() -> None:
    linears = [module for module in model().model.modules() if isinstance(module, nn.Linear)]
    largest = max(module.weight.numel() for module in linears) * torch.bfloat16.itemsize
    found = {phase: parts.get("dequantized") for phase, parts in phases(SHAPE, replace(LORA, quantized=4)).items()}
    assert found == {"load": None, "rollout": largest, "logprobs": largest, "update": largest}
    assert not any("dequantized" in parts for parts in phases(SHAPE, LORA).values())


@pytest.mark.parametrize("choice", shipped_models())
def test_parameters_of_shipped_models_follow_from_their_shape(choice: str) -> None:
    _, shape = shipped_models()[choice]
    assert replace(shape, given_parameters=0).parameters() == shape.given_parameters > 0


@pytest.mark.parametrize("double", [False, True])
def test_weights_in_four_bits_take_what_bitsandbytes_takes(double: bool) -> None:
    full = model(NUMBERS | {"hidden_size": 256, "intermediate_size": 512})
    packed = 0
    for name, module in full.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            inputs, outputs = module.in_features, module.out_features
            quantized = Linear4bit(inputs, outputs, bias=False, quant_type="nf4", compress_statistics=double)
            quantized.load_state_dict(module.state_dict())
            state = quantized.to("cpu").weight.quant_state
            packed += quantized.weight.nbytes + state.absmax.nbytes
            packed += state.state2.absmax.nbytes if double else 0
            packed -= module.weight.nbytes
    shape = replace(SHAPE, hidden_size=256, intermediate_size=512)
    planned = weights(shape, replace(WORKLOAD, quantized=4, double_quantized=double))
    assert planned == pytest.approx(size(full.parameters()) + packed, rel=0.01)


@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_32bit", "sgd"])
def test_the_optimizers_state_is_as_large_as_after_a_real_step(tmp_path: Any, optimizer: str) -> None:
    numbers = NUMBERS | {"hidden_size": 256, "intermediate_size": 512}
    policy = model(numbers)
    arguments = TrainingArguments(str(tmp_path), optim=optimizer, report_to="none", use_cpu=True, bf16=True)
    made = Trainer(policy, arguments).create_optimizer()
    policy(torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
    made.step()
    held = {
        tensor.untyped_storage().data_ptr(): tensor
        for state in made.state.values()
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor) and "qmap" not in name
    }
    planned = optimizer_state(shape_of(numbers), replace(WORKLOAD, optimizer=optimizer))
    assert planned == pytest.approx(size(held.values()), rel=0.02)


def cached(numbers: dict[str, Any], rows: int, new: int) -> int:
    policy = model(numbers)
    output = policy.generate(
        torch.ones(rows, 10, dtype=torch.long), max_new_tokens=new, min_new_tokens=new, return_dict_in_generate=True
    )
    layers = output[CACHE].layers
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


def test_the_cache_is_as_large_as_after_a_real_generation() -> None:
    workload = replace(WORKLOAD, completion=20)
    last = kv_cache(SHAPE, replace(workload, prompt=0, completion=1))  # the last token is not fed in again
    assert kv_cache(SHAPE, workload) - last == cached(NUMBERS, workload.sequences, 20)


def test_a_sliding_window_layer_caches_no_more_than_its_window() -> None:
    numbers = NUMBERS | {"model_type": "mistral", "sliding_window": 8}
    shape = shape_of(numbers)
    assert (shape.sliding_window, shape.num_sliding_layers) == (8, 3)
    real = cached(numbers, 4, 20)
    one = kv_cache(shape, replace(WORKLOAD, prompt=0, completion=1))
    assert real <= kv_cache(shape, replace(WORKLOAD, completion=20)) <= real + one


class Peak(TorchDispatchMode):
    """The bytes of all tensors that operations make, at most at once; not those of a policy's weights."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.known = {weight.untyped_storage()._cdata: 0 for weight in policy.parameters()}
        self.now = self.highest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self.known:
                self.known[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.highest = max(self.highest, self.now)
                weakref.finalize(storage, self.freed, storage._cdata)
        return made

    def freed(self, storage: int) -> None:
        self.now -= self.known.pop(storage)


@pytest.mark.parametrize(("device", "shares_keys"), [("cpu", True), ("cpu", False), ("cuda", True)])
@pytest.mark.parametrize(("prompt", "new", "group"), [(200, 50, 4), (20, 200, 4), (100, 100, 16)])
def test_generation_takes_what_is_planned(
    prompt: int, new: int, group: int, device: str, shares_keys: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts of different lengths, and completions that all become as long as they may."""
    if device == "cuda":  # where keys are repeated for each query head
        monkeypatch.setattr(
            "grpo.generation.transformers.continuous_batching.takes_grouped_keys", sdpa_attention.use_gqa_in_sdpa
        )
    if device == "cuda" or not shares_keys:
        monkeypatch.setattr(
            "grpo.generation.transformers.continuous_batching.why_repeated",
            lambda model: "not on a CPU, or not by sdpa",
        )
    policy = model(NUMBERS | {"max_position_embeddings": 512}).eval()
    rows = [[5] * length for length in (prompt, prompt // 2) for _ in range(group)]

    def inputs_of(places: list[int]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([[0] * (prompt - len(rows[place])) + rows[place] for place in places])
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}

    how = {"do_sample": True, "top_k": 0, "temperature": 0.9, "max_new_tokens": new, "eos_token_id": None}
    with Peak(policy) as measured:
        ContinuousBatching().complete(
            policy, first_equal(rows), inputs_of, ("input_ids", "attention_mask"), how, "", group
        )
    workload = replace(WORKLOAD, prompt=prompt, completion=new, sequences=2 * group, completions_per_prompt=group)
    packs = hasattr(sdpa_attention, "pack_gqa")  # since transformers 5.24 a token's keys are not repeated on GPUs, too
    if device == "cuda" and packs:
        device, shares_keys = "cpu", False
    planned = rollout(SHAPE, replace(workload, device=device, shares_keys=shares_keys))
    held = sum(planned[name] for name in ("kv cache", "activations", "logits"))
    assert held == pytest.approx(measured.highest, rel=0.1)


# --- Temporary memory ---


def kept_by_autograd(policy: Any, tokens: int) -> int:
    """Bytes that the layers keep for the backward pass, each storage once, without parameters and masks."""
    own = {weight.untyped_storage().data_ptr() for weight in policy.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own and tensor.numel() >= tokens:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    mask = torch.ones(1, tokens, dtype=torch.long)
    mask[0, 0] = 0  # with padding, so that attention gets a mask
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        output = policy.get_base_model() if hasattr(policy, "peft_config") else policy
        hidden = output.model(torch.ones(1, tokens, dtype=torch.long), attention_mask=mask, use_cache=False)
    assert hidden is not None
    return size(kept.values())


MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 160}
SINKS: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 160}
FAMILIES: dict[str, tuple[dict[str, Any], float]] = {  # numbers of their own, and how near the plan is
    "llama": ({}, 0.03),
    "qwen2": ({}, 0.03),
    "qwen3": ({}, 0.03),
    "smollm3": ({}, 0.03),
    "mistral": ({}, 0.03),
    "gemma3_text": ({}, 0.05),
    "phi3": ({}, 0.05),
    "glm4": ({}, 0.05),
    "exaone4": ({}, 0.05),
    "gpt_oss": (SINKS, 0.15),
    "qwen3_moe": (MIXTURE, 0.2),
    "mixtral": ({"num_local_experts": 8, "num_experts_per_tok": 2}, 0.2),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_layer_keeps_what_autograd_keeps_of_it(family: str, method: str) -> None:
    tokens, sizes = 800, []  # beside which copies of the adapters are small
    numbers, near = FAMILIES[family]
    numbers = NUMBERS | {"model_type": family} | numbers
    for layers in (2, 3):
        policy = model(numbers | {"num_hidden_layers": layers})
        if method == "lora":
            policy = get_peft_model(policy, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
            keep_inputs_uncast(policy)
        sizes.append(kept_by_autograd(policy.train(), tokens))
    workload = Workload(0, tokens, 1, tokens, adapter=Adapter(16) if method == "lora" else None)
    shape = shape_of(numbers)
    planned = layer_kept(shape, workload, tokens, masked=tokens) + adapted_experts(shape, workload)
    assert planned == pytest.approx(sizes[1] - sizes[0], rel=near)
    assert trained(shape_of(numbers | {"num_hidden_layers": 3}), workload)[0] == sum(
        weight.numel() for weight in policy.parameters() if weight.requires_grad
    )


@pytest.mark.parametrize("modules", [("q_proj", "v_proj", "down_proj"), None])
@pytest.mark.parametrize(("bfloat16", "dropout"), [(True, 0.0), (False, 0.0), (True, 0.1), (False, 0.1)])
def test_adapters_keep_what_autograd_keeps_of_them(
    modules: tuple[str, ...] | None, bfloat16: bool, dropout: float
) -> None:
    tokens, sizes = 400, []
    targets = list(modules) if modules else "all-linear"
    for layers in (2, 3):
        policy = model(NUMBERS | {"num_hidden_layers": layers})
        lora = LoraConfig(r=16, target_modules=targets, lora_dropout=dropout, task_type="CAUSAL_LM")
        policy = get_peft_model(policy, lora)
        keep_inputs_uncast(policy)
        for weight in policy.parameters():
            if weight.requires_grad and bfloat16:  # as under ZeRO-3
                weight.data = weight.data.bfloat16()
        sizes.append(kept_by_autograd(policy.train(), tokens))
    adapter = Adapter(16, modules, size=2 if bfloat16 else 4, dropout=bool(dropout))
    workload = Workload(0, tokens, 1, tokens, adapter=adapter, device="cpu")
    planned = layer_kept(shape_of(NUMBERS), workload, tokens, masked=tokens)
    assert planned == pytest.approx(sizes[1] - sizes[0], rel=0.03)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_update_takes_what_the_simulation_says(method: str, checkpointing: bool) -> None:
    numbers = NUMBERS | {"hidden_size": 512, "intermediate_size": 1500, "vocab_size": 8000, "num_attention_heads": 32}
    adapter = Adapter(16) if method == "lora" else None
    workload = Workload(0, 600, 2, 1200, adapter=adapter, checkpointing=checkpointing, optimizer="adamw_torch_fused")
    parts = update(shape_of(numbers), workload)
    simulated = simulate(numbers, method, checkpointing, rows=2, length=600)
    assert sum(parts.values()) - parts["context"] == pytest.approx(simulated, rel=0.1)


def committed() -> Iterator[Any]:
    file = ROOT / "benchmarks" / "simulation.json"
    for case in json.loads(file.read_text())["cases"]:
        name = "-".join(str(case[key]) for key in ("model", "method", "checkpointing", "rows", "length", "mlp_tile"))
        yield pytest.param(case, id=name)


@pytest.mark.parametrize("case", committed())
def test_the_plan_is_still_what_the_committed_simulations_say(case: dict[str, Any]) -> None:
    workload = Workload(
        prompt=0,
        completion=case["length"],
        sequences=case["rows"],
        tokens=case["rows"] * case["length"] // (2 if case["length"] == LONG else 1),  # a long sequence is alone
        mlp_tile=case["mlp_tile"],
        adapter=Adapter(16) if case["method"] == "lora" else None,
        optimizer="adamw_torch_fused",
        checkpointing=case["checkpointing"],
    )
    parts = update(shipped_models()[case["model"]][1], workload)
    assert (sum(parts.values()) - parts["context"]) / GB == pytest.approx(case["simulated_gb"], rel=0.015)


def test_lines_of_plans_are_still_what_the_simulation_counts() -> None:
    for case in json.loads((ROOT / "benchmarks" / "plan_lines.json").read_text())["cases"]:
        now = planned(case["model"])
        for line, (simulated, was) in case["lines"].items():
            assert now[line] == pytest.approx(was, abs=0.001), "python -m benchmarks.plan_lines writes it again"
            assert now[line] == pytest.approx(simulated, rel=0.1 if line == "all other" else 0.01)


# --- Phases ---

workloads = st.builds(
    Workload,
    prompt=st.integers(1, 2000),
    completion=st.integers(1, 4000),
    sequences=st.integers(1, 256),
    tokens=st.integers(1, 32768),
    completions_per_sequence=st.integers(1, 16),
    weight_bytes=st.sampled_from([2, 4]),
    adapter=st.none() | st.builds(Adapter, st.integers(1, 256)),
    optimizer=st.sampled_from(["adamw_torch", "adamw_8bit", "paged_adamw_8bit", "sgd"]),
    checkpointing=st.booleans(),
    reference=st.booleans(),
    gradients_on_host=st.booleans(),
    activations_on_host=st.booleans(),
    mlp_tile=st.sampled_from([0, 1024]),
    masks=st.booleans(),
    shares_keys=st.booleans(),
    device=st.sampled_from(["cuda", "cpu"]),
    images=st.none() | st.builds(Images, st.integers(1, 256), st.integers(1, 64), st.none() | st.integers(1, 10**7)),
    freeze=st.sampled_from([(), ("vision",), ("vision", "projector")]),
)
shapes = st.sampled_from([shape for _, shape in shipped_models().values()])


@given(shapes, workloads)
def test_every_component_is_positive_and_each_phase_has_weights(shape: Shape, workload: Workload) -> None:
    for parts in phases(shape, workload).values():
        assert all(size > 0 for size in parts.values())
        assert parts["weights"] + parts.get("vision weights", 0) == pytest.approx(weights(shape, workload))


@given(shapes, workloads, st.sampled_from(["prompt", "completion", "sequences", "tokens", "completions_per_sequence"]))
def test_more_of_anything_never_takes_less(shape: Shape, workload: Workload, key: str) -> None:
    # longer sequences of as many tokens have less padding to whole chunks
    assume(key in ("sequences", "tokens") or not shape.recurrent or shape.recurrent.chunk_size == 1)
    names = ("rollout",) if key == "prompt" else ()  # fewer of a micro-batch's tokens are then scored by the head
    more = replace(workload, **{key: getattr(workload, key) + 1})
    assert peak(shape, more, *names) >= peak(shape, workload, *names)


@given(shapes, workloads)
def test_what_saves_memory_saves_memory(shape: Shape, workload: Workload) -> None:
    plain = replace(workload, checkpointing=False, gradients_on_host=False, adapter=None, optimizer="adamw_torch")
    plain = replace(plain, activations_on_host=False, mlp_tile=0)
    embeddings = shape.embeddings + (shape.per_layer.embeddings if shape.per_layer else 0)
    for change in (
        {"checkpointing": True},
        {"gradients_on_host": True},
        {"adapter": Adapter(16)},
        # whose state of embeddings is in float32, and so larger than the weights' type
        *([{"optimizer": "adamw_8bit"}] if embeddings < shape.parameters() / 4 else ()),
        {"reference": False},
        {"mlp_tile": min(plain.microbatch, 4096) // 2},
        {"masks": False},
        {"shares_keys": True},
    ):
        if "adapter" in change:  # it keeps activations of its own, which for many tokens of a small model are more
            plain = replace(plain, tokens=min(plain.tokens, 4096))
        assert peak(shape, replace(plain, **change)) <= peak(shape, plain), change
    checkpointed = replace(plain, checkpointing=True)
    assert peak(shape, replace(checkpointed, activations_on_host=True)) <= peak(shape, checkpointed)


def test_a_sleeping_engine_leaves_its_share_to_the_update() -> None:
    awake = replace(LORA, vllm_fraction=0.4, gpu_memory=16 * GB)
    asleep = replace(awake, vllm_sleeps=True)
    assert update(SHAPE, awake)["vllm"] == rollout(SHAPE, asleep)["vllm"] == 0.4 * 16 * GB
    assert update(SHAPE, asleep)["vllm"] < 0.5 * GB
    assert "kv cache" not in rollout(SHAPE, awake)


def test_vllms_linear_weights_in_eight_bits_take_a_byte_each() -> None:
    workload = replace(LORA, sends_adapter=True, adapter=Adapter(8))
    linear = sum(inputs * outputs * count for inputs, outputs, count in SHAPE.all_linears())
    plain, quantized = (copy_of_weights(SHAPE, replace(workload, vllm_fp8=fp8)) for fp8 in (False, True))
    assert plain - quantized == linear


def test_an_image_policy_or_a_mixture_is_read_from_its_text_part() -> None:
    mixture = shape_of(
        {
            **NUMBERS,
            "model_type": "qwen3_moe",
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "tie_word_embeddings": False,
        }
    )
    numbers = {**NUMBERS, "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
    numbers |= {"moe_intermediate_size": 64, "tie_word_embeddings": False}
    assert mixture.parameters() == model(numbers).num_parameters()
    assert mixture.active_width == 128
    config = AutoConfig.for_model("llava_next")
    shape = shape_of(config.to_dict())
    assert shape.hidden_size == config.text_config.hidden_size
