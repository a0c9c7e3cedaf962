"""Features of images by weights that are not trained: computed once for generation, scoring and update."""

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo.model.image_features import keep_image_features
from grpo.model.vision import parts
from grpo.trainer import ExactGRPOTrainer
from tests import vision_policies
from tests.stock_trl import make, relative_difference, train


def patches_of(trainer: Any) -> list[int]:
    """Note how many images, or tiles and patches, go through the first linear module of a tower's layers."""
    seen = []
    tower = [trainer.model.get_submodule(name) for name in parts(trainer.model)["vision"]]
    layers = next(one for module in tower for one in module.modules() if isinstance(one, torch.nn.ModuleList))
    inside = next(one for one in layers[0].modules() if isinstance(one, torch.nn.Linear))
    inside.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[:-1].numel()))
    return seen


def trained(family: str, method: str, folder: Path, most: int, **options: Any) -> tuple[list[int], Any]:
    """Train with features kept of `most` images, or of none."""
    given = {**vision_policies.options(family, method), **options, "max_steps": 2, "num_iterations": 1}
    trainer = make(ExactGRPOTrainer, folder, **given)
    if most:
        keep_image_features(trainer.model, most)
    seen = patches_of(trainer)
    return seen, train(trainer)


@pytest.mark.parametrize("family", vision_policies.FAMILIES)
def test_a_frozen_tower_sees_each_image_once(family: str, tmp_path: Path) -> None:
    generated = {"rollout_func": None, "beta": 0.1}  # generation, scoring by policy and reference, update
    before, plain = trained(family, "LoRA", tmp_path, most=0, **generated)
    after, kept = trained(family, "LoRA", tmp_path, most=100, **generated)
    once = before[0], before[-1]  # all images of a step at once
    assert sum(after) == 2 * once[0] + once[1], "the first time also as before, for comparison"
    assert sum(before) > 2 * sum(after)
    for one, other in zip(kept.gradients, plain.gradients, strict=True):
        assert relative_difference(one, other) <= 1e-6


def test_few_features_are_kept_of_many_images(tmp_path: Path) -> None:
    _, plain = trained("qwen2_5_vl", "LoRA", tmp_path, most=0)
    seen, kept = trained("qwen2_5_vl", "LoRA", tmp_path, most=1)
    assert len(seen) > 10
    for one, other in zip(kept.gradients, plain.gradients, strict=True):
        assert relative_difference(one, other) <= 1e-6


@pytest.mark.parametrize("method", ["full", "frozen tower", "LoRA of the tower too"])
def test_features_of_trained_weights_are_never_kept(method: str, tmp_path: Path) -> None:
    """With a frozen tower the projector is trained."""
    seen, plain = trained("qwen2_vl", method, tmp_path, most=0)
    again, kept = trained("qwen2_vl", method, tmp_path, most=100)
    assert sum(again) - sum(seen) < max(seen)  # the images of the first call, until one has shown it
    for one, other in zip(kept.gradients, plain.gradients, strict=True):
        assert relative_difference(one, other) <= 1e-6
