"""A policy that sees images: they follow their rows into micro-batches and into halves of generation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as Picture
from transformers import (
    AutoTokenizer,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
)
from trl import GRPOTrainer

from grpo.config.schema import ROOT
from grpo.trainer import ExactGRPOTrainer, Update
from tests.stock_trl import make, relative_difference, rollouts, train

TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def processor() -> LlavaNextProcessor:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "grpo" / "tiny")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    images = LlavaNextImageProcessor(
        size={"shortest_edge": 16},
        crop_size={"height": 16, "width": 16},
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
    )
    return LlavaNextProcessor(
        images, tokenizer, 8, "default", TEMPLATE, num_additional_image_tokens=1, image_token="<image>"
    )


def policy(processor: LlavaNextProcessor) -> LlavaNextForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlavaNextConfig(
        vision_config=CLIPVisionConfig(**sizes, image_size=16, patch_size=8, projection_dim=32),
        text_config=LlamaConfig(**sizes, vocab_size=len(processor.tokenizer), initializer_range=0.3),
        image_token_index=processor.tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=[[16, 32], [32, 16], [32, 32]],
        vision_feature_layer=-2,
    )
    return LlavaNextForConditionalGeneration(config)


def problems() -> Dataset:
    random = np.random.default_rng(0)
    rows = []
    for row in range(16):
        shape = ((20, 40, 3), (40, 20, 3), (30, 30, 3))[row % 3]
        question = [{"role": "user", "content": "How many ?" if row % 2 else "Tom had 3 red pens and 1 ."}]
        rows.append({"prompt": question, "images": [Picture.fromarray(random.integers(0, 255, shape, dtype=np.uint8))]})
    prompt = List({"role": Value("string"), "content": Value("string")})
    return Dataset.from_list(rows, features=Features({"prompt": prompt, "images": List(Image())}))


def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [(sum(ids) % 7) / 3 if row >= 4 else 1.0 for row, ids in enumerate(completion_ids)]


def options(processor: LlavaNextProcessor) -> dict[str, Any]:
    def fixed(prompts: list, trainer: Any) -> dict[str, Any]:
        prompt_ids = trainer._tokenize_prompts(prompts)[0]
        return rollouts([""] * len(prompts), trainer) | {"prompt_ids": prompt_ids}

    return {
        "model": policy(processor),
        "processing_class": processor,
        "train_dataset": problems(),
        "rollout_func": fixed,
        "reward_funcs": reward,
        "num_iterations": 2,
        "max_steps": 3,
    }


@pytest.mark.parametrize("slices", [1, 4])
def test_gradient_with_images_is_that_of_stock_trl(tmp_path: Path, processor: LlavaNextProcessor, slices: int) -> None:
    sizes = {"gradient_accumulation_steps": slices, "per_device_train_batch_size": 16 // slices}
    theirs = train(make(GRPOTrainer, tmp_path, **options(processor), **sizes))
    trainer = make(ExactGRPOTrainer, tmp_path, update=Update(200), **options(processor), **sizes)
    ours = train(trainer, start_from=theirs.weights)
    assert ours.logs[0]["update/microbatches"] >= 3
    assert ours.logs[0]["update/rows_skipped"] == 4
    for mine, stock in zip(ours.gradients, theirs.gradients, strict=True):
        assert any("vision_tower" in name and value.any() for name, value in mine.items())
        assert relative_difference(mine, stock) <= 1e-5


def test_generation_with_images_is_split_between_prompts(tmp_path: Path, processor: LlavaNextProcessor) -> None:
    completions = {}
    for limit in (99, 4):
        trainer = make(
            ExactGRPOTrainer, tmp_path, **options(processor) | {"rollout_func": None, "top_k": 1, "max_steps": 1}
        )
        generate = trainer.model.generate

        def within_memory(generate: Any = generate, limit: int = limit, **inputs: Any) -> torch.Tensor:
            if inputs["input_ids"].size(0) > limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return generate(**inputs)

        trainer.model.generate = within_memory
        record = train(trainer)
        completions[limit] = list(trainer._logs["completion"])
    assert record.logs[0]["update/oom_retries"] == 2
    assert completions[99] == completions[4]
