"""The parts of vision-language models: which weights train, and which stay bit for bit as they are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PaliGemmaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from grpo.data.images import is_unused
from grpo.data.task import load_task
from grpo.extras.builtin_policies.build import vision_model, vision_processor
from grpo.model import policy
from grpo.model.vision import detach_frozen_tower, freeze, parts
from grpo.trainer import ExactGRPOTrainer
from grpo.trainer.batch import check
from grpo.utils.errors import ConfigError
from grpo.view.images import View
from tests import vision_policies
from tests.stock_trl import make, ours, relative_difference, train

WIDTH = 32
TEXT = {
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
}
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TOWER |= {"image_size": 56, "patch_size": 14}
QWEN = {"depth": 2, "num_heads": 2, "embed_dim": 16, "hidden_size": 16, "out_hidden_size": WIDTH}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llava": (TOWER, TEXT),
    "llava_next": (TOWER, TEXT),
    "gemma3": (TOWER, TEXT),
    "internvl": ({**TOWER, "image_size": [56, 56], "patch_size": [14, 14]}, TEXT),
    "idefics3": (TOWER, TEXT),
    "smolvlm": (TOWER, TEXT),
    "mistral3": (TOWER, TEXT),
    "qwen2_vl": ({**QWEN, "hidden_size": WIDTH}, {**TEXT, **SECTIONS}),
    "qwen2_5_vl": (QWEN, {**TEXT, **SECTIONS}),
    "qwen3_vl": ({**QWEN, "deepstack_visual_indexes": [0]}, {**TEXT, **SECTIONS}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_tower_projector_and_text_model_are_found_in_each_family(family: str) -> None:
    vision, text = FAMILIES[family]
    config = CONFIG_MAPPING[family](vision_config=vision, text_config=text, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    found = {
        part: {name for name, _ in model.named_parameters() if name.startswith(tuple(f"{one}." for one in modules))}
        for part, modules in parts(model).items()
    }
    assert found["vision"]
    assert found["projector"]
    assert not found["vision"] & found["projector"]
    rest = {name for name, _ in model.named_parameters()} - found["vision"] - found["projector"]
    of_language = ("model.language_model.", "model.text_model.", "lm_head.", "model.image_newline")
    assert all(name.startswith(of_language) for name in rest)
    assert not any(layer in name for name in found["projector"] for layer in ("layers", "blocks"))


def test_a_text_model_has_nothing_to_freeze() -> None:
    model: Any = vision_model(vision_processor().tokenizer, 0).model.language_model
    with pytest.raises(ConfigError, match=r"model\.freeze: vision: the model has none"):
        freeze(model, ["vision"])


def test_a_tower_that_no_image_reaches_is_frozen_by_itself() -> None:
    model = vision_model(vision_processor().tokenizer, 0)
    freeze(model, [], unused=True)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained == {name for name, _ in model.named_parameters() if LANGUAGE in name or "lm_head" in name}


def test_a_tower_beside_the_head_leaves_the_model_its_weights() -> None:
    config = CONFIG_MAPPING["llama4"]()
    for part in (config.text_config, config.vision_config):
        part.num_hidden_layers = 1
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    assert parts(model)["projector"] == ["multi_modal_projector"]


def test_a_model_that_trl_cannot_show_images_is_refused(composed: Callable[..., DictConfig]) -> None:
    """PaliGemma's processor makes labels, and takes no prompt without an image."""
    tokenizer = vision_policies.tokenizer_with("<image>")
    tokenizer.bos_token = tokenizer.eos_token
    images = SiglipImageProcessorPil(size={"height": 16, "width": 16})
    images.image_seq_length = 4
    processor = PaliGemmaProcessor(images, tokenizer)
    with pytest.raises(ValueError, match="a batch with labels"):
        check(View(processor, None, None, None).fields())
    config = composed("task=arithmetic")
    with pytest.raises(ConfigError, match=r"task\.images is not set: `images` are expected"):
        is_unused(config.task, config.model, None, processor)


LANGUAGE, PROJECTOR, TOWER_WEIGHTS = "language_model", "multi_modal_projector", "vision_tower"


@pytest.mark.parametrize(
    ("overrides", "moves"),
    [
        ([], {LANGUAGE, PROJECTOR, TOWER_WEIGHTS}),
        (["model.freeze=[vision]"], {LANGUAGE, PROJECTOR}),
        (["model.freeze=[vision,projector]"], {LANGUAGE}),
        (["peft=lora"], {LANGUAGE}),
        (["peft=lora", "peft.vision=true"], {LANGUAGE, PROJECTOR, TOWER_WEIGHTS}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_frozen_stays_bit_for_bit_and_the_rest_moves(
    overrides: list[str], moves: set[str], composed: Callable[..., DictConfig], tmp_path: Path
) -> None:
    """In three steps that see images, generated with them."""
    processor = vision_processor()
    model = vision_model(processor.tokenizer, 0)
    model.save_pretrained(tmp_path / "model")
    config = composed("task=shapes", "task.dataset.size=16", "task.eval.size=0", *overrides)
    config.model.model_name_or_path = str(tmp_path / "model")
    trainer = make(
        ExactGRPOTrainer,
        tmp_path,
        model=model,
        processing_class=processor,
        train_dataset=load_task(config.task, processor).train,
        rollout_func=None,
        reward_funcs=lambda completion_ids, **kwargs: [float(sum(ids) % 7) for ids in completion_ids],
        peft_config=policy.peft_config(config.peft, config.model),
        max_steps=3,
    )
    freeze(trainer.model, config.model.freeze)
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert all(weight.grad is None for name, weight in after.items() if not weight.requires_grad)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {place for name in changed for place in (LANGUAGE, PROJECTOR, TOWER_WEIGHTS) if place in name} == moves


@pytest.mark.parametrize("method", ["frozen tower", "LoRA", "LoRA of the tower too"])
@pytest.mark.parametrize("family", vision_policies.FAMILIES)
def test_checkpointing_recomputes_no_layer_of_a_frozen_tower(family: str, method: str, tmp_path: Path) -> None:
    calls, gradients = [], []
    for detach in (False, True):
        trainer = ours(tmp_path, gradient_checkpointing=True, **vision_policies.options(family, method))
        if detach:
            detach_frozen_tower(trainer.model)
        calls.append(0)

        def count(*inputs: Any) -> None:
            calls[-1] += 1

        tower = [trainer.model.get_submodule(name) for name in parts(trainer.model)["vision"]]
        layers = next(one for module in tower for one in module.modules() if isinstance(one, torch.nn.ModuleList))
        inside = next(one for one in layers[0].modules() if isinstance(one, torch.nn.Linear))
        inside.register_forward_pre_hook(count)  # transformers 5.23 calls hooks of the layer itself once
        gradients.append(train(trainer).gradients)
    assert (calls[1] < calls[0]) == (method != "LoRA of the tower too")
    for before, after in zip(*gradients, strict=True):
        assert relative_difference(after, before) <= 1e-6
