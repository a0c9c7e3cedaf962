"""Small random policies that see images, of three families that hand their images over in different ways.

LLaVA-Next cuts an image into tiles, and TRL pads them; the Qwens' images are rows of patches of any number. A Qwen's
processor without torchvision, whose videos it would need: this one takes images alone.
"""

from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, Image, List, Value
from peft import LoraConfig
from PIL import Image as Picture
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    CLIPVisionConfig,
    Idefics3Config,
    Idefics3Processor,
    LlamaConfig,
    LlavaNextConfig,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLProcessor,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from grpo.config.schema import ROOT
from grpo.model.vision import freeze, parts
from tests.stock_trl import rollouts

FAMILIES = ("llava_next", "qwen2_vl", "qwen2_5_vl")
METHODS = ("full", "frozen tower", "LoRA", "LoRA of the tower too")
TEXT = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
"""Heads of 32 numbers, the least that vLLM takes on a CPU."""
DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 32,
}
"""Numbers of a tiny Qwen3.5: the first layer keeps a state, the second has full attention."""
TILES = [[16, 32], [32, 16], [32, 32]]
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


class ImagesOnly(Qwen2_5_VLProcessor):
    """A Qwen's processor that needs no torchvision, and takes no videos."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        """Accept that there is no processor of videos."""
        return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)


def tokenizer_with(*tokens: str, base: str = "tiny") -> PreTrainedTokenizerBase:
    """The tokenizer of a built-in policy and some more tokens."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "grpo" / "builtin" / base)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    return tokenizer


def make_processor(family: str, base: str = "tiny") -> Any:
    """The processor of a family, with the tokenizer of a built-in policy."""
    if family == "llava_next":
        side = {"height": 16, "width": 16}
        images = LlavaNextImageProcessor(size={"shortest_edge": 16}, crop_size=side, image_grid_pinpoints=TILES)
        template, tokenizer = TEMPLATE.replace("IMAGE", "<image>"), tokenizer_with("<image>", base=base)
        return LlavaNextProcessor(images, tokenizer, 8, "default", template, "<image>", num_additional_image_tokens=1)
    pixels = {"shortest_edge": 64, "longest_edge": 1024}
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=pixels)
    tokenizer = tokenizer_with("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", base=base)
    template = TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    return ImagesOnly(images, tokenizer, None, chat_template=template)


def make_policy(family: str, processor: Any) -> PreTrainedModel:
    """A random policy of a family, of about 100,000 parameters, whose gradients are neither tiny nor all alike."""
    torch.manual_seed(0)
    text: dict[str, Any] = {**TEXT, "vocab_size": len(processor.tokenizer), "initializer_range": 0.2}
    if family == "llava_next":
        config: Any = LlavaNextConfig(
            vision_config=CLIPVisionConfig(**TEXT, image_size=16, patch_size=8, projection_dim=32),
            text_config=LlamaConfig(**text),
            image_token_index=processor.image_token_id,
            image_grid_pinpoints=TILES,
            vision_feature_layer=-2,
        )
        return AutoModelForImageTextToText.from_config(config)
    tower: dict[str, Any] = {
        "depth": 2,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "initializer_range": 0.2,
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    if family == "qwen2_vl":
        tower |= {"embed_dim": 16, "hidden_size": 64, "mlp_ratio": 2}
    else:
        tower |= {"hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 64}
    if family == "qwen2_5_vl":
        tower |= {"window_size": 16, "fullatt_block_indexes": [1]}
    if family == "qwen3_5":
        tower |= {"num_position_embeddings": 64}
        text |= DELTA_NET
        rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
    ids = {name: processor.tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad")}
    sides = {name: processor.tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    return AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(
            family,
            vision_config=tower,
            text_config={**text, "num_key_value_heads": 1, "rope_parameters": rope},
            image_token_id=ids["image_pad"],
            video_token_id=ids["video_pad"],
            **{f"{name}_token_id": token for name, token in sides.items()},
        )
    )


def idefics() -> tuple[PreTrainedModel, Any]:
    """A random policy whose tensors have the images of a row side by side, and its processor."""
    tokenizer = tokenizer_with("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
    images = Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 32})
    processor = Idefics3Processor(images, tokenizer, 4, chat_template=TEMPLATE.replace("IMAGE", "<image>"))
    torch.manual_seed(0)
    config = Idefics3Config(
        vision_config={**TEXT, "image_size": 32, "patch_size": 8},
        text_config=LlamaConfig(**TEXT, vocab_size=len(tokenizer), initializer_range=0.2),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AutoModelForImageTextToText.from_config(config), processor


def problems() -> Dataset:
    """Sixteen prompts with images of three sizes, two of them in every fourth."""
    random = np.random.default_rng(0)
    rows = []
    for row in range(16):
        shape = ((20, 40, 3), (40, 20, 3), (30, 30, 3))[row % 3]
        question = [{"role": "user", "content": "How many ?" if row % 2 else "Tom had 3 red pens and 1 ."}]
        shown = [random.integers(0, 255, shape, dtype=np.uint8) for _ in range(2 if row % 4 == 3 else 1)]
        rows.append({"prompt": question, "images": [Picture.fromarray(pixels) for pixels in shown]})
    prompt = List({"role": Value("string"), "content": Value("string")})
    return Dataset.from_list(rows, features=Features({"prompt": prompt, "images": List(Image())}))


def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Anything, but equal within the first group."""
    return [(sum(ids) % 7) / 3 if row >= 4 else 1.0 for row, ids in enumerate(completion_ids)]


def fixed(prompts: list, trainer: Any) -> dict[str, Any]:
    """The completions of `rollouts`, to prompts with images."""
    return rollouts([""] * len(prompts), trainer) | {"prompt_ids": trainer._tokenize_prompts(prompts)[0]}


def options(family: str, method: str) -> dict[str, Any]:
    """Arguments of `tests.stock_trl.make` for a policy of a family; LoRA's adapters are random, and not zero."""
    processor = make_processor(family)
    model = make_policy(family, processor)
    freeze(model, ["vision"] if method == "frozen tower" else [])
    arguments = {
        "model": model,
        "processing_class": processor,
        "train_dataset": problems(),
        "rollout_func": fixed,
        "reward_funcs": reward,
        "num_iterations": 2,
        "max_steps": 3,
    }
    if method.startswith("LoRA"):
        without = None if method != "LoRA" else "|".join(f"{name}.*" for part in parts(model).values() for name in part)
        linear = {"target_modules": "all-linear", "exclude_modules": without}
        arguments["peft_config"] = LoraConfig(r=4, init_lora_weights=False, **linear)
    return arguments
