"""A mixture's checkpoint of another number of processes, before anything is loaded."""

import json
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from transformers import AutoConfig

from grpo.config.resolve import resolve
from grpo.config.schema import ROOT
from grpo.planning.fit import make_plan
from grpo.planning.hub_config import shape_of
from grpo.run.checkpoint import NUMBERS, checkpoint_for
from grpo.utils.errors import ConfigError
from grpo.utils.manifest import seal

MIXTURE = "model=qwen3_6_35b_a3b"
REFUSED = r"the loss of a mixture's routers depends on .* train.router_aux_loss_coef=0$"


def test_routers_with_a_loss_keep_their_processes(composed: Callable[..., DictConfig], tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-1"
    checkpoint.mkdir()
    for rank in range(2):
        (checkpoint / f"rng_state_{rank}.pth").touch()
    seal(checkpoint)
    resume_from = f"train.resume_from_checkpoint={checkpoint}"
    with pytest.raises(ConfigError, match=f"checkpoint-1 is of 2 processes instead of 1: {REFUSED}"):
        checkpoint_for(resolve(composed(MIXTURE, resume_from), None), tmp_path, Console(file=StringIO()))
    without = resolve(composed(MIXTURE, resume_from, "train.router_aux_loss_coef=0"), None)
    assert checkpoint_for(without, tmp_path, Console(file=StringIO())) == checkpoint


def test_a_checkpoint_of_another_model_is_refused(composed: Callable[..., DictConfig], tmp_path: Path) -> None:
    checkpoint, console = tmp_path / "checkpoint-8", Console(file=StringIO())
    checkpoint.mkdir()
    shutil.copy(ROOT / "grpo" / "builtin" / "tiny" / "config.json", checkpoint)
    seal(checkpoint)
    resume_from = f"train.resume_from_checkpoint={checkpoint}"
    with pytest.raises(ConfigError, match=r"checkpoint-8 has the weights of another model than .*tiny_vision: \w+=\d+"):
        checkpoint_for(resolve(composed("+experiment=shapes", resume_from), None), tmp_path, console)
    assert checkpoint_for(resolve(composed(resume_from), None), tmp_path, console) == checkpoint


@pytest.mark.parametrize("choice", sorted(file.stem for file in (ROOT / "conf" / "model").glob("*.yaml")))
def test_a_saved_model_has_the_shape_of_its_choice(choice: str, tmp_path: Path) -> None:
    """Or a run of it would take its own checkpoint for that of another model."""
    model = OmegaConf.load(ROOT / "conf" / "model" / f"{choice}.yaml")
    shape = OmegaConf.to_container(model.get("model", model).shape)
    AutoConfig.for_model(**{name: value for name, value in shape.items() if name != "parameters"}).save_pretrained(
        tmp_path
    )
    saved, planned = shape_of(json.loads((tmp_path / "config.json").read_text())), shape_of(shape)
    assert [getattr(saved, name) for name in NUMBERS] == [getattr(planned, name) for name in NUMBERS]


def test_a_new_run_without_a_step_left_is_refused(composed: Callable[..., DictConfig], tmp_path: Path) -> None:
    checkpoint, console = tmp_path / "checkpoint-8", Console(file=StringIO())
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": 8}))
    seal(checkpoint)
    settings = resolve(composed(f"train.resume_from_checkpoint={checkpoint}", "train.max_steps=8"), None)
    (other := tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match=r"train.max_steps=8: .*checkpoint-8 has 8 steps, so that none is left"):
        checkpoint_for(settings, other, console)
    assert checkpoint_for(settings, tmp_path, console) == checkpoint, "its own run, which may lack its end"


def test_a_range_of_machines_is_refused_for_them(composed: Callable[..., DictConfig]) -> None:
    machines = ("launch.nodes=1:2", "+gpu=h100", "train.gradient_accumulation_steps=2", "generation=transformers")
    with pytest.raises(ConfigError, match=f"launch.nodes=1:2: {REFUSED}"):
        make_plan(composed(MIXTURE, *machines))
    make_plan(composed(MIXTURE, *machines, "train.router_aux_loss_coef=0"))
