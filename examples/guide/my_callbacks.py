"""A callback of docs/run.md."""

from transformers import TrainerCallback


class LogLengths(TrainerCallback):
    """Prints the mean length of completions every few steps, and leaves the last one in `summary.json`."""

    def __init__(self, every: int = 10) -> None:
        self.every, self.summary = every, {}

    def on_log(self, args, state, control, logs, **kwargs):
        """Read the metrics of a step, which have TRL's names."""
        length = logs.get("completions/mean_length")
        if length is not None:
            self.summary = {"last_mean_length": length}
            if state.global_step % self.every == 0:
                print(f"step {state.global_step}: {length:.1f} tokens")
