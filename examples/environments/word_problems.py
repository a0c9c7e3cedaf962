"""A taskset of verifiers with a tool: word problems with numbers up to 9999, and a calculator."""

from collections.abc import Iterable

import verifiers.v1 as vf

from grpo.builtin.tasks import calculator

__all__ = ["WordProblems"]


class Problem(vf.TaskData):
    """A word problem with its answer."""

    answer: str


class Used(vf.State):
    """What a conversation has used so far."""

    calls: int = 0


class Calculator(vf.Toolset[vf.ToolsetConfig, Used]):
    """The tool of a conversation."""

    TOOL_PREFIX = None  # the policy knows it as `calculator`, without the name of this class

    @vf.tool
    def calculator(self, expression: str) -> str:
        """Calculate the value of an arithmetic expression.

        Args:
            expression: Numbers, + - * / and parentheses, for example (412 + 367) * 4
        """
        self.state.calls += 1
        return calculator.calculator(expression)


class Solve(vf.Task[Problem, Used]):
    """Tool and scores of a conversation."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        """Return the tools of a conversation."""
        return [Calculator(vf.ToolsetConfig())]

    @vf.reward
    async def solved(self, trace: vf.Trace) -> float:
        """Return 1 if the last message ends with the answer."""
        return float(trace.last_reply.split()[-1:] == [self.data.answer])

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        """Return the calls of the calculator."""
        return float(trace.state.calls)


class WordProblemsConfig(vf.TasksetConfig):
    """What a command line can change, by `task.environment_args`."""

    size: int = 3000
    seed: int = 0


class WordProblems(vf.Taskset[Solve, WordProblemsConfig]):
    """Word problems."""

    def load(self) -> Iterable[Solve]:
        """Yield tasks."""
        for row in calculator.rows("train", self.config.size, self.config.seed):
            yield Solve(Problem(prompt=row["question"], answer=row["answer"]), self.config.task)
