"""The vision tower and the projector in the plan, against the models, adapters and tensors of the libraries."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from omegaconf import DictConfig, OmegaConf
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, BitsAndBytesConfig
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.quantizers.base import get_keys_to_not_convert

from benchmarks.simulation_vision import METHODS, in_float32, plan, simulate
from grpo.config.schema import ROOT
from grpo.model.vision import freeze, parts
from grpo.planning.adapters import adapter_parameters
from grpo.planning.advice import advise, harmless_first, other_models
from grpo.planning.fit import make_plan
from grpo.planning.from_config import shipped_models, workload_of
from grpo.planning.host import host
from grpo.planning.hub_config import shape_of
from grpo.planning.images import (
    decoded,
    forward,
    images_at_once,
    in_update,
    layer_kept,
    patches,
    pixel_values,
    profiled,
)
from grpo.planning.memory import logprobs, rollout, update
from grpo.planning.persistent import optimizer_state, persistent, trained, weights
from grpo.planning.shape import Shape
from grpo.planning.vision import Vision
from grpo.planning.workload import Adapter, Images, Sharding, Workload
from grpo.trainer.adapter_inputs import keep_inputs_uncast
from grpo.utils.limits import GB

SHIPPED = [choice for choice, (_, shape) in shipped_models().items() if shape.vision]
TEXT = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 64,
}
OF_QWEN = {"depth": 2, "num_heads": 4, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_vl": OF_QWEN | {"embed_dim": 64, "hidden_size": 48, "mlp_ratio": 3},
    "qwen2_5_vl": OF_QWEN | {"hidden_size": 64, "intermediate_size": 192, "out_hidden_size": 48},
    "qwen3_vl": OF_QWEN
    | {"hidden_size": 64, "intermediate_size": 192, "out_hidden_size": 48, "deepstack_visual_indexes": [0]},
    "smolvlm": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 280,
        "patch_size": 14,
    },
}
FAMILIES["llava"] = FAMILIES["smolvlm"] | {"model_type": "clip_vision_model"}


def numbers(family: str) -> dict[str, Any]:
    """The shape of a small model."""
    text = TEXT | ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}})
    if family.startswith("qwen"):
        text.pop("model_type")
    else:
        text.pop("rope_parameters")
    return {"model_type": family, "text_config": text, "vision_config": dict(FAMILIES[family]), "pad_token_id": 0}


def small(family: str, **vision: Any) -> Any:
    """A small model of random weights."""
    shape = numbers(family)
    shape["vision_config"] |= vision
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(AutoConfig.for_model(**shape), dtype=torch.bfloat16)


def described(family: str) -> tuple[Shape, Vision]:
    """Its shape, and the vision part of that."""
    shape = shape_of(numbers(family))
    assert shape.vision
    return shape, shape.vision


def workload(**options: Any) -> Workload:
    """A workload of two completions with one image each."""
    return Workload(100, 30, 2, 260, **{"images": Images(2, 2), **options})


# --- Weights ---


@pytest.mark.parametrize("choice", SHIPPED)
def test_tower_and_projector_parameters_match_the_built_model(choice: str) -> None:
    shape: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "model" / f"{choice}.yaml").shape)
    total = shape.pop("parameters")
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**shape))
    found = shape_of(shape)
    assert of_parts(model) == counted(found)
    assert model.num_parameters() == total == found.parameters()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parameters_of_other_sizes_match_the_built_model(family: str) -> None:
    assert of_parts(small(family)) == counted(described(family)[0])


def of_parts(model: Any) -> dict[str, int]:
    """Parameters of a model's parts, without those for audio."""
    return {
        part: sum(w.numel() for name in names if "audio" not in name for w in model.get_submodule(name).parameters())
        for part, names in parts(model).items()
    }


def counted(shape: Shape) -> dict[str, int]:
    """Parameters of a shape's parts."""
    assert shape.vision
    return {part: shape.vision.parameters_of(part) for part in ("vision", "projector")}


@pytest.mark.parametrize("family", FAMILIES)
def test_bitsandbytes_quantizes_linear_modules_of_the_tower_too(family: str) -> None:
    model = small(family)
    config = BitsAndBytesConfig(load_in_4bit=True)
    replace_with_bnb_linear(model, modules_to_not_convert=get_keys_to_not_convert(model), quantization_config=config)
    packed = [one for one in model.modules() if isinstance(one, Linear4bit)]
    shape, _ = described(family)
    assert sum(one.in_features * one.out_features for one in packed) == sum(
        i * o * n for i, o, n in shape.all_linears()
    )
    half = weights(shape, workload(quantized=8))
    assert half == 2 * shape.parameters() - sum(i * o * n for i, o, n in shape.all_linears())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("vision", [False, True])
def test_the_adapter_is_on_the_tower_only_with_peft_vision(family: str, vision: bool) -> None:
    adapted = with_adapter(small(family), vision)
    found = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    assert adapter_parameters(described(family)[0], Adapter(8, vision=vision)) == found


def with_adapter(model: Any, vision: bool) -> Any:
    """The model with LoRA matrices as `grpo.model.policy.peft_config` asks for them, and as the trainer has them."""
    without = "|".join(f"{re.escape(name)}(\\..*)?" for name in chain.from_iterable(parts(model).values()))
    lora = LoraConfig(r=8, target_modules="all-linear", exclude_modules=None if vision else without)
    adapted = get_peft_model(model, lora)
    keep_inputs_uncast(adapted)
    return adapted


@pytest.mark.parametrize("frozen", [(), ("vision",), ("projector",), ("vision", "projector")])
def test_only_what_is_trained_has_gradients_and_optimizer_state(frozen: tuple[str, ...]) -> None:
    model = small("qwen2_5_vl")
    freeze(model, frozen)
    count = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    shape, some = described("qwen2_5_vl")[0], workload(freeze=frozen)
    shape = replace(shape, given_parameters=model.num_parameters())
    assert trained(shape, some) == (count, 2)
    assert optimizer_state(shape, some) == 2 * 2 * count
    assert update(shape, some)["gradients"] == 2 * count


def test_the_tower_is_a_row_of_its_own_in_every_phase() -> None:
    shape, some = shipped_models()["qwen2_5_vl_3b"][1], workload()
    assert shape.vision
    rows = persistent(shape, some)
    assert rows["vision weights"] == 2 * shape.vision.parameters_of("vision", "projector")
    assert rows["weights"] + rows["vision weights"] == weights(shape, some)


def test_a_tower_is_read_from_other_families_or_ignored() -> None:
    for family, name in (("internvl", "internvl"), ("mllama", "mllama"), ("qwen3_vl_moe", "qwen3_vl")):
        shape = shape_of(AutoConfig.for_model(family).to_dict())
        assert shape.vision, family
        assert shape.vision.model_type == name
        assert shape.vision.patch_size == 14 or name == "qwen3_vl"
    unknown = numbers("llava") | {"vision_config": {"width": 7}}
    assert shape_of(unknown).vision is None
    assert persistent(shape_of(unknown), workload())["weights"] > 0


# --- Images ---


def test_an_image_has_the_patches_that_pixels_or_prompt_allow() -> None:
    _, qwen = described("qwen2_5_vl")
    assert patches(qwen, workload()) == 4 * 100
    assert patches(qwen, workload(images=Images(2, 2, max_pixels=28 * 28 * 64))) == 4 * 64
    assert patches(qwen, workload(images=Images(2, 2, max_pixels=10**7))) == 4 * 100, "longer prompts are filtered"


def test_a_fixed_size_tower_gets_the_tiles_that_the_prompt_holds() -> None:
    shape = shipped_models()["smolvlm2"][1]
    assert shape.vision
    tile = 27 * 27
    assert patches(shape.vision, workload()) == tile
    assert patches(shape.vision, replace(workload(), prompt=500)) == 6 * tile, "81 tokens each"
    assert patches(shape.vision, replace(workload(), prompt=4000)) == 17 * tile
    assert patches(described("llava")[1], replace(workload(), prompt=4000)) == 20 * 20


def test_a_micro_batch_has_at_most_as_many_images_as_fit_in_it() -> None:
    _, qwen = described("qwen2_5_vl")
    some = replace(workload(images=Images(64, 64, max_pixels=28 * 28 * 64)), tokens=650)
    assert images_at_once(qwen, some, 64) == 10, "of 64 tokens and one more"
    assert images_at_once(qwen, some, 4) == 4
    assert images_at_once(qwen, replace(some, tokens=1, prompt=60, completion=1), 64) == 1


def test_pixel_values_are_as_large_as_those_of_the_processor() -> None:
    picture = Image.fromarray(np.zeros((280, 280, 3), dtype=np.uint8))
    limits = {
        "shortest_edge": 28 * 28,
        "longest_edge": 280 * 280,
    }  # `max_pixels` would change all processors
    qwen = Qwen2VLImageProcessorPil(size=limits)(images=[picture], return_tensors="pt")
    shown = replace(workload(images=Images(2, 2, max_pixels=280 * 280)), prompt=1000)
    assert pixel_values(described("qwen2_5_vl")[1], shown) == qwen["pixel_values"].nbytes
    tiled = SmolVLMImageProcessorPil(size={"longest_edge": 4 * 280}, max_image_size={"longest_edge": 280})
    smol = tiled(images=[[picture]], return_tensors="pt")
    planned = pixel_values(described("smolvlm")[1], replace(shown, prompt=10_000))
    assert planned == smol["pixel_values"].nbytes + smol["pixel_attention_mask"].nbytes


def test_pixel_values_stay_on_the_device_for_each_completion() -> None:
    shape, qwen = described("qwen2_5_vl")
    some = workload(images=Images(per_generation=32, per_step=8))
    one = pixel_values(qwen, some)
    assert update(shape, some)["pixel values"] == (32 + 8 + 2) * one
    assert rollout(shape, some)["pixel values"] == (32 + 2) * one, "and of those that are generated"
    assert rollout(shape, replace(some, on_server=True))["pixel values"] == 32 * one
    assert logprobs(shape, some)["pixel values"] == (2 * 32 + 2) * one, "beside the last generation's"
    assert "pixel values" not in update(shape, replace(some, images=None))


def test_features_of_a_frozen_tower_and_projector_are_kept() -> None:
    shape, qwen = described("qwen2_5_vl")
    some = workload(images=Images(per_generation=32, per_step=8), completions_per_prompt=8, adapter=Adapter(8))
    one = patches(qwen, some) // qwen.spatial_merge_size**2 * qwen.out_hidden_size * some.compute_bytes
    for phase in (rollout, logprobs, update):
        assert phase(shape, some)["image features"] == 32 // 8 * one
    frozen = replace(some, adapter=None, freeze=("vision", "projector"))
    assert update(shape, frozen)["image features"] == 32 // 8 * one
    for method in (
        {"adapter": Adapter(8, vision=True)},
        {"freeze": ("vision",), "adapter": None},
        {"sharding": Sharding("fsdp", 3, 2)},
    ):
        assert "image features" not in update(shape, replace(some, **method))


def test_the_processor_takes_host_memory_in_every_process() -> None:
    shape, qwen = described("qwen2_5_vl")
    some = workload(images=Images(per_generation=10**5, per_step=8, opened=10**4), processes=3)
    assert host(shape, some)["images"] == 3 * decoded(qwen, some)
    assert decoded(qwen, some) == 4 * 100 * (2 * 10**4 * 3 * 14 * 14 + 10**5 * 3 * 4 * 1176)
    assert "images" not in host(shape, replace(some, images=None))


def test_images_of_all_prompts_of_a_step_are_in_host_memory() -> None:
    _, qwen = described("qwen2_5_vl")
    some = workload(images=Images(per_generation=64, per_step=64), processes=100, completions_per_prompt=8)
    alone = decoded(qwen, replace(some, processes=1))
    one = pixel_values(qwen, some)
    assert decoded(qwen, some) - alone == (101 * 8 - 3 * 64) * one, "instead of the processor's and its copies"
    assert decoded(qwen, replace(some, sharding=Sharding("fsdp", 3, 100))) == alone, "where images stay"


# --- Activations ---


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["full", "frozen", "lora"])
def test_a_layer_of_the_tower_keeps_what_autograd_keeps_of_it(family: str, method: str) -> None:
    depth = "depth" if family.startswith("qwen") else "num_hidden_layers"
    sizes = []
    for layers in (2, 3):
        model = small(family, **{depth: layers})
        if method == "lora":
            model = with_adapter(model, vision=True).get_base_model()
        elif method == "frozen":
            freeze(model, ["vision"])
            model.get_submodule(parts(model)["vision"][0]).register_forward_hook(of_gradient)
        sizes.append(kept_by_tower(model))
    adapter = Adapter(8, vision=True) if method == "lora" else None
    some = workload(adapter=adapter, checkpointing=True, freeze=("vision",) if method == "frozen" else ())
    planned = layer_kept(described(family)[1], some)
    assert planned == pytest.approx((sizes[1] - sizes[0]) / 400, rel=0.05)


def of_gradient(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Let the backward pass go through a frozen tower."""
    return output.requires_grad_()


def tower_of(model: Any) -> Any:
    """Return the tower of a model."""
    ends = ("visual", "vision_tower", "vision_model")
    return next(module for name, module in model.named_modules() if name.endswith(ends))


def features(tower: Any) -> torch.Tensor:
    """Return what the tower makes of an image of 400 patches."""
    if hasattr(tower.config, "spatial_merge_size"):
        pixels, grid = torch.randn(400, 3 * 2 * 14 * 14), torch.tensor([[1, 20, 20]])
        return tower.train()(pixels, grid_thw=grid).last_hidden_state
    return tower.train()(pixel_values=torch.randn(1, 3, 280, 280, dtype=torch.bfloat16)).last_hidden_state


def kept_by_tower(model: Any) -> int:
    """Bytes that the tower keeps of an image of 400 patches, each storage once, without parameters."""
    tower = tower_of(model)
    own = {weight.untyped_storage().data_ptr() for weight in tower.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own and tensor.numel() >= 400:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        patch.object(torch.nn.functional, "layer_norm", in_float32),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        features(tower)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_a_trained_tower_takes_more_and_checkpointing_less() -> None:
    shape, qwen = described("qwen2_5_vl")
    full = in_update(qwen, workload())[0]
    assert full > in_update(qwen, workload(checkpointing=True))[0]
    assert full > in_update(qwen, workload(freeze=("vision",)))[0] > 0, "of the projector"
    assert in_update(qwen, workload(adapter=Adapter(8)))[0] == 0
    assert in_update(qwen, workload(adapter=Adapter(8, vision=True)))[0] > 0
    assert update(shape, workload())["vision activations"] == full
    assert update(shape, workload(images=None))["vision activations"] == 0


# --- Beside a simulation ---


def committed() -> Iterator[Any]:
    for case in json.loads((ROOT / "benchmarks" / "simulation_vision.json").read_text())["cases"]:
        name = f"{case['model']}-{case['method']}-{case['checkpointing']}"
        yield pytest.param(case, id=name)


@pytest.mark.parametrize("case", committed())
def test_the_plan_is_still_what_the_committed_simulations_say(case: dict[str, Any]) -> None:
    shape: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "model" / f"{case['model']}.yaml").shape)
    for part, layers in case["layers"].items():
        shape[part]["depth" if "depth" in shape[part] else "num_hidden_layers"] = layers
    side = int(case["patches"] ** 0.5)
    planned = plan(shape, case["method"], case["checkpointing"], case["rows"], side) / GB
    assert planned == pytest.approx(case["simulated_gb"], rel=0.05)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
@pytest.mark.parametrize("method", METHODS)
def test_an_update_with_images_takes_what_the_simulation_says(family: str, method: str) -> None:
    shape = numbers(family)
    shape["text_config"] |= {"hidden_size": 256, "intermediate_size": 700, "head_dim": 64, "vocab_size": 4000}
    if "rope_parameters" in shape["text_config"]:
        shape["text_config"]["rope_parameters"]["mrope_section"] = [16, 8, 8]
        shape["vision_config"] |= {"out_hidden_size": 256}
    shape["vision_config"] |= {"hidden_size": 256, "intermediate_size": 700}
    simulated = simulate(shape, method, checkpointing=False, rows=2, side=20)
    assert plan(shape, method, checkpointing=False, rows=2, side=20) == pytest.approx(simulated, rel=0.1)


def test_an_engine_has_room_for_images_when_it_starts(composed: Callable[..., DictConfig]) -> None:
    """As vLLM profiles it: 4,096 tokens of images, or the largest one if that has more."""
    _, qwen = described("qwen2_5_vl")
    some, large = (workload(images=Images(2, 2, max_pixels=28 * 28 * tokens)) for tokens in (64, 16_384))
    large = replace(large, prompt=20_000)
    assert profiled(qwen, some) < profiled(qwen, large) < 4 * profiled(qwen, some)
    assert profiled(qwen, some) > 4096 * 4 * forward(qwen, some)
    assert profiled(qwen, replace(some, images=None)) == profiled(None, some) == 0
    line = (*IMAGES, "+gpu=rtx3090", "generation=vllm_colocate", "task.max_pixels=200704")
    shares = [
        make_plan(composed(*line, *text)).settings["train.vllm_gpu_memory_utilization"]
        for text in (("task.images=null",), ())
    ]
    assert shares[0] < shares[1]


# --- From the configuration ---

IMAGES = ("model=qwen2_5_vl_3b", "task.images=image", "task.conversational=true", "task.max_prompt_length=512")


def test_images_and_frozen_parts_are_read_from_the_configuration(composed: Callable[..., DictConfig]) -> None:
    line = (*IMAGES, "task.max_pixels=200704", "train.per_device_train_batch_size=4", "train.num_generations=4")
    line = (*line, "train.gradient_accumulation_steps=2", "train.steps_per_generation=4")
    full = workload_of(composed(*line, "peft=none", "model.freeze=[vision]"), "cuda")
    assert full.images == Images(per_generation=16, per_step=8, opened=4, max_pixels=200704)
    assert full.freeze == ("vision",)
    assert full.completions_per_sequence == 4
    assert workload_of(composed(*line, "update.share_prompts=false"), "cuda").completions_per_sequence == 1
    lora = workload_of(composed(*line, "peft=lora", "peft.vision=true"), "cuda")
    assert lora.adapter
    assert lora.adapter.vision
    assert workload_of(composed(*IMAGES[:1]), "cuda").images is None


# --- Advice ---

TIGHT = (
    *IMAGES,
    "+gpu=a100_40gb",
    "peft=none",
    "train.optim=paged_adamw_8bit",
    "update.gradients_on_host=true",
    "train.gradient_checkpointing=false",
    "train.max_completion_length=256",
    "update.max_tokens_per_microbatch=1536",
    "task.max_prompt_length=2000",
)


def advised(composed: Callable[..., DictConfig], *line: str) -> list[str]:
    config = composed(*line)
    return [word for suggestion in advise(line, config, make_plan(config)) for word in suggestion["overrides"]]


def test_freezing_or_fewer_pixels_is_advised_for_a_large_tower(
    composed: Callable[..., DictConfig],
) -> None:
    found = advised(composed, *TIGHT)
    assert "model.freeze=[vision]" in found
    pixels = [word for word in found if word.startswith("task.max_pixels=")]
    assert len(pixels) == 1
    assert int(pixels[0].partition("=")[2]) < 4 * 2000 * 14 * 14
    assert make_plan(composed(*TIGHT)).problem
    for word in ("model.freeze=[vision]", *pixels):
        assert make_plan(composed(*TIGHT, word)).problem is None, word


def test_what_has_no_effect_is_not_advised(composed: Callable[..., DictConfig]) -> None:
    keys = lambda *line: {key for change, _ in harmless_first(composed(*line)) for key in change}  # noqa: E731
    assert {"model.freeze", "task.max_pixels"} <= keys(*TIGHT)
    assert "model.freeze" not in keys(*TIGHT, "model.freeze=[vision]")
    assert "model.freeze" not in keys(*TIGHT, "peft=lora", "update.gradients_on_host=false")
    assert not {"model.freeze", "task.max_pixels"} & keys(*TIGHT, "task.images=null")
    assert "task.max_pixels" not in keys(*TIGHT, "model=smolvlm2")
    assert "peft.vision" in keys(*TIGHT, "peft=lora", "peft.vision=true", "update.gradients_on_host=false")


def test_suggested_models_take_images_as_the_chosen_one_does(
    composed: Callable[..., DictConfig],
) -> None:
    larger = {"qwen2_5_vl_7b", "qwen3_vl_4b", "qwen3_vl_8b", "qwen3_5_4b", "qwen3_5_9b", "qwen3_5_27b"}
    larger |= {"qwen3_6_27b", "qwen3_6_35b_a3b", "gemma3_4b", "gemma3_12b", "gemma4_e2b", "gemma4_e4b"}
    assert set(other_models(composed(*IMAGES), larger=True)) == larger
    assert not set(SHIPPED) & set(other_models(composed("model=qwen2_5_3b"), larger=True))
