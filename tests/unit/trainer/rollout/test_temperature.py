"""A temperature that changes with the steps: what samples, what scores, and for how long."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from grpo.config.options import Rollout
from tests.stock_trl import ScriptedEngine, ours, relative_difference, rollouts, train

COOLING: dict[str, Any] = {"temperature": 2.0, "rollout": Rollout(temperature_end=0.5), "max_steps": 4}


def sampled(trainer: Any, engine: bool) -> list[tuple[bool, float]]:
    """A list of the temperatures of generations to come, each with whether it is for training."""
    found = []

    def noting(prompts: list[str], trainer: Any) -> dict[str, Any]:
        found.append((trainer.model.training, trainer.generation_config.temperature))
        assert trainer.generation_kwargs["temperature"] == trainer.generation_config.temperature
        return rollouts(prompts, trainer)

    if engine:
        scripted = ScriptedEngine(trainer)
        generate = scripted.generate

        def by_engine(*args: Any, **options: Any) -> Any:
            found.append((trainer.model.training, scripted.temperature))
            return generate(*args, **options)

        scripted.generate = by_engine
    else:
        trainer.rollout_func = noting
    return found


@pytest.mark.parametrize("engine", [False, True], ids=["transformers", "vLLM"])
def test_the_temperature_moves_linearly_to_that_of_the_end(tmp_path: Path, engine: bool) -> None:
    trainer = ours(tmp_path, **COOLING)
    found = sampled(trainer, engine)
    logs = train(trainer).logs
    assert found == [(True, 2.0), (True, 1.5), (True, 1.0), (True, 0.5)]
    assert [row["sampling/temperature"] for row in logs] == [2.0, 1.5, 1.0, 0.5]


def test_evaluations_keep_the_temperature_of_the_start(tmp_path: Path) -> None:
    held_out = Dataset.from_dict({"prompt": ["How many ?"] * 4})
    options = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}
    trainer = ours(tmp_path, eval_dataset=held_out, **COOLING | options)
    found = sampled(trainer, engine=False)
    train(trainer)
    assert {value for training, value in found if not training} == {2.0}
    assert [value for training, value in found if training] == [2.0, 1.5, 1.0, 0.5]


def test_rollouts_are_scored_at_the_temperature_they_have(tmp_path: Path) -> None:
    """Two steps of each generation: the second scores at the temperature of the first, and a resumed one too."""
    options = COOLING | {"num_iterations": 2, "save_strategy": "steps", "save_steps": 1}
    trainer = ours(tmp_path / "whole", **options)
    seen, compute = [], trainer.compute_loss

    def noting(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = compute(model, inputs, *args, **kwargs)
        prompt = inputs["prompt_ids"][0][inputs["prompt_mask"][0] == 1]
        completion = inputs["completion_ids"][0][inputs["completion_mask"][0] == 1]
        with torch.no_grad():
            logits = model(torch.cat((prompt, completion))[None]).logits[0, len(prompt) - 1 : -1]
        scored = trainer._scores[0][0][: len(completion)]
        step, found = trainer.state.global_step, {}
        for temperature in (2.0, 1.5, 1.0, 0.5):
            mine = (logits / temperature).log_softmax(-1).gather(1, completion[:, None])[:, 0]
            found[temperature] = float((mine - scored).abs().max())
        seen.append((step, min(found, key=found.__getitem__), min(found.values())))
        return loss

    trainer.compute_loss = noting
    train(trainer)
    assert {(step, temperature) for step, temperature, _ in seen} == {(0, 2.0), (1, 2.0), (2, 1.0), (3, 1.0)}
    assert max(difference for *_, difference in seen) < 1e-4
    resumed = ours(tmp_path / "resumed", **options)
    resumed.generations = 1  # the last of the checkpoint
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert relative_difference(resumed.model.state_dict(), trainer.model.state_dict()) == 0
