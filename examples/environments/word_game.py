"""An environment of gymnasium with texts: word problems, whose action is an expression that is calculated."""

from typing import Any

import gymnasium
from gymnasium import spaces

from grpo.builtin.tasks import calculator
from grpo.extras.environments.gymnasium import Gymnasium

PROBLEMS = calculator.rows("train", 3000, 0)


class WordGame(gymnasium.Env):
    """An episode is a word problem and a single action, an expression; an expression for the answer earns 1."""

    observation_space = spaces.Text(200)
    action_space = spaces.Text(calculator.LONGEST, min_length=1, charset="0123456789+-*/(). ")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """Draw a problem."""
        super().reset(seed=seed)
        self.problem = PROBLEMS[self.np_random.integers(len(PROBLEMS))]
        return self.problem["question"], {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Calculate an expression."""
        value = calculator.calculator(action)
        return value, float(value == self.problem["answer"]), True, False, {}


gymnasium.register("WordGame-v0", WordGame)


class Calculator(Gymnasium):
    """The adapter with a tool of the name that the built-in policy knows."""

    def calculator(self, expression: str) -> str:
        """Calculate the value of an arithmetic expression.

        Args:
            expression: Numbers, + - * / and parentheses
        """
        return self.step(expression)
