"""The beginning of rollouts, as TRL begins them."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from trl import GRPOTrainer

from grpo.builtin.tasks.calculator import calculator
from grpo.trainer import ExactGRPOTrainer
from grpo.trainer.rollout import episodes
from tests.unit.trainer.rollout.test_tool_calls import PROMPTS, Game, with_tools


class Maze(Game):
    """An environment that speaks in parts of a content, and whose method is awaited."""

    def reset(self, number: int, **columns: Any) -> Any:
        super().reset(number)
        return [{"type": "text", "text": " Go."}] if number else None

    async def step(self, direction: str) -> str:
        """Step.

        Args:
            direction: where to
        """
        return direction


class Begun(Exception):
    """Of TRL's method, as soon as the prompts are there."""


def rows(**columns: Any) -> list[dict[str, Any]]:
    return [{"prompt": PROMPTS[row], "number": row % 2, **columns} for row in range(4)]


CASES = {
    "plain": ({}, [{"prompt": "1 + 1"}]),
    "tools": ({"tools": [calculator]}, rows()),
    "environment": ({"environment_factory": Game}, rows()),
    "parts and a coroutine": ({"environment_factory": Maze, "tools": [calculator]}, rows()),
    "no prompt": ({"environment_factory": Game}, [{"number": 1}]),
    "images": ({"environment_factory": Game}, rows(images=[Image.new("RGB", (8, 8))])),
    "an image, or none": ({}, [*rows(image=None)[:1], *rows(image=Image.new("RGB", (8, 8)))[1:]]),
    "no images": ({}, rows(images=[])),
}


@pytest.mark.parametrize("case", CASES)
def test_rollouts_begin_as_those_of_trl(tmp_path: Path, case: str) -> None:
    options, given = CASES[case]
    trainer = with_tools(GRPOTrainer, tmp_path, **{"tools": None, **options})
    seen: list[Any] = []

    def generate(prompts: list[Any]) -> None:
        seen.append((prompts, trainer.environments, *tools_of(trainer)))
        raise Begun

    trainer._generate = generate
    with pytest.raises(Begun):
        trainer._generate_and_score_completions(
            [{**row, "images": row["images"]} if "images" in row else row for row in given]
        )
    trainer._sync_tool_dicts = trainer._async_tool_dicts = trainer.environments = None
    prompts = episodes.begin(trainer, given)
    assert seen == [(prompts, trainer.environments, *tools_of(trainer))]


def tools_of(trainer: Any) -> tuple[Any, Any]:
    return (trainer._sync_tool_dicts, trainer._async_tool_dicts) if trainer.tools else (None, None)


def test_several_environments_have_instances_of_their_own(tmp_path: Path) -> None:
    trainer = with_tools(GRPOTrainer, tmp_path, environment_factory={"game": Game, "maze": Maze})
    some = [{**row, "environment": name} for row, name in zip(rows(), ("maze", "game", "maze", "game"), strict=True)]
    prompts = episodes.begin(trainer, some)
    assert [type(one) for one in trainer.environments] == [Maze, Game, Maze, Game]
    assert len(set(map(id, trainer.environments))) == 4
    assert prompts[1][-1]["content"].endswith(" Ben has 5.")
    assert [sorted(tools) for tools in trainer._sync_tool_dicts] == [["calculator"]] * 4
    assert [sorted(tools) for tools in trainer._async_tool_dicts] == [["step"], [], ["step"], []]


REFUSED = {
    "an unknown environment": ({"environment_factory": {"game": Game}}, {"environment": "chess"}, "chess"),
    "images beside a text": (
        {"tools": None},
        {"prompt": "1 + 1", "images": [Image.new("RGB", (8, 8))]},
        "chat template",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_trl_refuses_are_refused(tmp_path: Path, case: str) -> None:
    given, row, message = REFUSED[case]
    for kind in (GRPOTrainer, ExactGRPOTrainer):
        with pytest.raises(ValueError, match=message):
            with_tools(kind, tmp_path, **given)._generate_and_score_completions([{**rows()[0], **row}] * 4)
