from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from grpo.config.schema import ROOT

FILES = sorted((ROOT / "conf" / "model").glob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_shape_builds_a_model_of_that_many_parameters(file: Path) -> None:
    config = OmegaConf.load(file)
    shape = OmegaConf.to_container(config.get("model", config).shape)
    assert isinstance(shape, dict)
    parameters = shape.pop("parameters")
    # Qwen2 puts biases on its projections and Qwen3 norms on its heads: `model_type` brings both.
    with torch.device("meta"):
        auto = AutoModelForImageTextToText if "vision_config" in shape else AutoModelForCausalLM
        model = auto.from_config(AutoConfig.for_model(shape.pop("model_type"), **shape))
    assert model.num_parameters() == parameters
