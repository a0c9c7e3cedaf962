"""An environment of docs/tools.md: a state per episode, a tool per public method, and a reward of its own."""


class GuessingGame:
    """A number that the policy finds by guesses."""

    def reset(self, number: int, **columns) -> str:
        """Begin an episode with a row of games.jsonl; the text is appended to its prompt."""
        self.number, self.guesses, self.solved = number, 0, False
        return "\nI think of a number from 1 to 100."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: From 1 to 100
        """
        self.guesses += 1
        self.solved = self.solved or number == self.number
        return "correct" if number == self.number else "larger" if number < self.number else "smaller"

    def get_reward(self) -> float:
        """Return 1 for a number that is found at once, less for each further guess, 0 for none."""
        return 1 / self.guesses if self.solved else 0.0
