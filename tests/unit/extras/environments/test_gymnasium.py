"""Environments of gymnasium: texts and numbers as actions, the reward of an episode, and what is refused."""

import subprocess
from contextlib import closing

import pytest

from grpo.config.schema import ROOT
from grpo.extras.environments.seeds import rows
from grpo.tools.processes import Source
from grpo.tools.running import environment_of

pytest.importorskip("gymnasium")
pytestmark = pytest.mark.slow  # gymnasium comes with `make extras`
GYMNASIUM = "grpo.extras.environments.gymnasium.Gymnasium"
GAME = f"{ROOT / 'examples' / 'environments' / 'word_game.py'}:Calculator"


def test_an_episode_of_numbers_ends_with_its_reward() -> None:
    arguments = {"is_slippery": False, "render_mode": "ansi"}
    with closing(Source([GYMNASIUM], True, 20.0, subprocess.DEVNULL, (("FrozenLake-v1",), arguments))) as source:
        environment = environment_of(source)()
        assert "SFFF" in environment.reset(seed=0, prompt=[]).replace("\x1b[41m", "").replace("\x1b[0m", "")
        for action in "112122":
            shown = environment.step(action=action)
        assert (shown.endswith("The episode has ended."), environment.get_reward()) == (True, 1.0)
        for action, says in (("1", "the episode has ended"), ("7", "no such action"), ("left", "invalid literal")):
            with pytest.raises(RuntimeError, match=says):
                environment.step(action=action)
            environment.reset(seed=0)
        assert environment.get_reward() == 0.0


def test_an_episode_of_texts_depends_on_its_seed() -> None:
    with closing(Source([GAME], True, 20.0, subprocess.DEVNULL, (("WordGame-v0",), {}))) as source:
        environment = environment_of(source)()
        asked = [environment.reset(**row) for row in [*rows("train", 3), *rows("train", 1)]]
        assert asked[0] == asked[3] != asked[1]
        assert environment.calculator(expression="2 * 3") == "6\nThe episode has ended."
        assert environment.get_reward() == 0.0


def test_what_no_text_can_name_is_refused() -> None:
    for name, says in (("Pendulum-v1", "neither numbers nor texts"), ("Nope-v0", "NameNotFound")):
        with pytest.raises(ValueError, match=says):
            Source([GYMNASIUM], True, 20.0, subprocess.DEVNULL, ((name,), {}))
    with pytest.raises(ValueError, match="missing 1 required positional argument: 'environment_id'"):
        Source([GYMNASIUM], True, 20.0, subprocess.DEVNULL)


def test_splits_share_no_seed() -> None:
    train, test = ({row["seed"] for row in rows(split, 50)} for split in ("train", "test"))
    assert (len(train), len(test), train & test) == (50, 50, set())
