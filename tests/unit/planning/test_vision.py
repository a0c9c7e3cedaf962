"""The vision part of a model's shape."""

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForImageTextToText

from grpo.config.schema import ROOT
from grpo.planning.vision import vision_of
from grpo.vision import parts

SHIPPED = ["qwen2_5_vl_3b", "qwen2_5_vl_7b", "qwen3_vl_2b", "qwen3_vl_4b", "qwen3_vl_8b"]


@pytest.mark.parametrize("choice", SHIPPED)
def test_the_parameters_of_tower_and_projector_are_those_of_the_built_model(choice: str) -> None:
    shape: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "model" / f"{choice}.yaml").shape)
    total, vision = shape.pop("parameters"), vision_of(shape)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**shape))
    built = {
        part: sum(weight.numel() for name in names for weight in model.get_submodule(name).parameters())
        for part, names in parts(model).items()
    }
    assert vision is not None
    assert built == {"vision": vision.tower_parameters(), "projector": vision.projector_parameters()}
    assert model.num_parameters() == total
