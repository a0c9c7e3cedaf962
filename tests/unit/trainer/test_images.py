"""A policy that sees images: they follow their sequences into micro-batches and into halves of generation."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.exactness import IMAGES, compare
from grpo.trainer import ExactGRPOTrainer
from tests.stock_trl import make, train
from tests.vision_policies import METHODS, options


@pytest.mark.parametrize("case", IMAGES)
def test_gradient_with_images_is_that_of_stock_trl(case: str) -> None:
    compared = compare(IMAGES[case]())
    assert max(compared.gradients) <= 1e-5
    assert compared.ours.logs[0]["update/microbatches"] >= 3
    assert compared.ours.logs[0]["update/rows_skipped"] == 4
    of_tower = [
        value
        for gradient in compared.ours.gradients
        for name, value in gradient.items()
        if ".vision_tower." in name or ".blocks." in name
    ]
    assert any(value.any() for value in of_tower) == case.endswith((METHODS[0], METHODS[3]))


def test_generation_with_images_is_split_between_prompts(tmp_path: Path) -> None:
    completions = {}
    for limit in (99, 4):
        given = options("llava_next", "full") | {"rollout_func": None, "top_k": 1, "max_steps": 1}
        trainer = make(ExactGRPOTrainer, tmp_path, **given)
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
