"""Environments of gymnasium with actions and observations that a text can name; see `task=gymnasium`."""

import inspect
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Gymnasium:
    """An environment whose tool is a step; its reward is the sum of an episode's rewards.

    Args:
        environment_id: id of a registered environment; `module:id` imports the module first.
        environment_args: keyword arguments of `gymnasium.make`; with `render_mode: ansi` the policy reads drawings.

    Raises:
        ValueError: its actions are neither numbers nor texts.
    """

    def __init__(self, environment_id: str, **environment_args: Any) -> None:
        self._environment = gymnasium.make(environment_id, **environment_args)
        if not isinstance(self._environment.action_space, spaces.Discrete | spaces.Text):
            raise ValueError(
                f"{environment_id}: actions are {self._environment.action_space}, neither numbers nor texts"
            )
        self._total, self._ended = 0.0, True

    def reset(self, seed: int | None = None, **columns: Any) -> str:
        """Begin an episode and return the first observation."""
        self._total, self._ended = 0.0, False
        observation, _ = self._environment.reset(seed=seed)
        return f"\n{self._shown(observation)}"

    def step(self, action: str) -> str:
        """Act in the environment and read what follows.

        Args:
            action: The action
        """
        if self._ended:
            raise ValueError("the episode has ended")
        observation, reward, terminated, truncated, _ = self._environment.step(self._action(action))
        self._total += float(reward)
        self._ended = terminated or truncated
        return f"{self._shown(observation)}\n{'The episode has ended.' if self._ended else ''}".strip()

    def get_reward(self) -> float:
        """Return the sum of the rewards of the episode."""
        return self._total

    def _action(self, action: str) -> Any:
        space = self._environment.action_space
        chosen = action if isinstance(space, spaces.Text) else int(action)
        if not space.contains(chosen):
            raise ValueError(f"no such action: {action!r:.80}; possible: {space}")
        return chosen

    def _shown(self, observation: Any) -> str:
        if self._environment.render_mode == "ansi":
            return str(self._environment.render()).strip()
        return inspect.cleandoc(str(observation.tolist() if isinstance(observation, np.ndarray) else observation))
