"""A server of OpenEnv with word problems: `python examples/environments/openenv_server.py 8000`, in its environment."""

import random
import sys
from pathlib import Path
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, ConcurrencyConfig, Observation, State

sys.path.insert(0, str(Path(__file__).parents[2]))
from grpo.builtin.tasks import calculator

PROBLEMS = calculator.rows("train", 3000, 0)


class Expression(Action):
    """An action: an expression to calculate."""

    message: str


class Text(Observation):
    """A question, or the value of an expression."""

    text: str


class WordProblems(Environment[Expression, Text, State]):
    """An episode is a word problem and a single action; an expression for the answer earns 1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> Text:
        """Draw a problem."""
        self.problem = random.Random(seed).choice(PROBLEMS)
        return Text(text=self.problem["question"])

    def step(self, action: Expression, timeout_s: float | None = None, **given: Any) -> Text:
        """Calculate an expression."""
        value = calculator.calculator(action.message)
        return Text(text=value, reward=float(value == self.problem["answer"]), done=True)

    @property
    def state(self) -> State:
        """Return the state of the episode, which has no steps to count."""
        return State()


if __name__ == "__main__":
    sessions = ConcurrencyConfig(max_concurrent_envs=256)
    app = create_fastapi_app(WordProblems, Expression, Text, concurrency_config=sessions)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
