"""Ask a trained policy: `python -m grpo.chat RUN_DIR "What is 12 + 30?"`, or without a question for a conversation.

A question is put as the run's prompts were, system prompt and examples included.
"""

import argparse
import logging
import string
from pathlib import Path
from typing import Any

from grpo.cli import leave
from grpo.errors import ConfigError
from grpo.runs.run_dir import Run, read_run
from rewards.text import printable

PROGRAM = "grpo.chat"


def prompt_of(question: str, run: Run) -> Any:
    """Return the prompt that asks this, as in the run.

    Raises:
        ConfigError: the run's prompts are made of several columns.
    """
    from grpo.data import make_prompt

    columns = [name for _, name, _, _ in string.Formatter().parse(run.config.task.prompt) if name]
    if len(set(columns)) != 1:
        raise ConfigError(
            f"task.prompt={run.config.task.prompt!r} is made of {len(columns)} columns, not of a question"
        )
    return make_prompt({columns[0]: question}, run.config.task)


def answer(question: str, run: Run, model: Any, tokenizer: Any, length: int, temperature: float) -> None:
    """Print the policy's answer while it is made."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            super().on_finalized_text(printable(text), stream_end)

    prompt = prompt_of(question, run)
    if isinstance(prompt, str):
        inputs = tokenizer(prompt, return_tensors="pt")
    else:
        inputs = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    how: dict[str, Any] = {"do_sample": bool(temperature), "repetition_penalty": 1.0}
    if temperature:
        how["temperature"] = temperature
    streamer = Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    model.generate(**inputs.to(model.device), max_new_tokens=length, streamer=streamer, **how)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__.splitlines()[0])
    parser.add_argument("run", help="a run directory")
    parser.add_argument("question", nargs="?", help="asked once; without one, questions are read line by line")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest tokens")
    parser.add_argument("--length", type=int, help="the most tokens of an answer; as in the run if it is left out")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    try:
        run = read_run(Path(asked.run))
        length = asked.length or run.config.train.max_completion_length
        prompt_of("", run)
        from grpo import policy

        model, tokenizer = policy.load(run.model, run.config.model)
        if asked.question is not None:
            answer(asked.question, run, model, tokenizer, length, asked.temperature)
            return
        print("Ask, one question a line; Ctrl-D ends it.")
        while True:
            answer(input("> "), run, model, tokenizer, length, asked.temperature)
    except ConfigError as error:
        leave(error, PROGRAM)
    except (EOFError, KeyboardInterrupt):
        print()


if __name__ == "__main__":
    main()
