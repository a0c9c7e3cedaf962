"""The word problems of openenv_server.py, with a tool of the name that the built-in policy knows."""

from grpo.extras.environments.openenv import OpenEnv


class Calculator(OpenEnv):
    """The adapter with a tool `calculator`."""

    def calculator(self, expression: str) -> str:
        """Calculate the value of an arithmetic expression.

        Args:
            expression: Numbers, + - * / and parentheses
        """
        return self.step(expression)
