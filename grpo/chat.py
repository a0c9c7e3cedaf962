"""Ask a trained policy: `python -m grpo.chat RUN_DIR "What is 12 + 30?"`, or without a question a conversation.

Prompts are built as in the run, with its system prompt and examples.
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
    """Return the prompt for a question, built as in the run.

    Raises:
        ConfigError: the run's prompts are built from several columns.
    """
    from grpo.data import make_prompt

    columns = [name for _, name, _, _ in string.Formatter().parse(run.config.task.prompt) if name]
    if len(set(columns)) != 1:
        raise ConfigError(
            f"task.prompt={run.config.task.prompt!r} is built from {len(columns)} columns, not from a question"
        )
    return make_prompt({columns[0]: question}, run.config.task)


def answer(question: str, run: Run, model: Any, tokenizer: Any, length: int, temperature: float) -> None:
    """Print the policy's answer while it is generated; at most `length` tokens, greedily at temperature 0."""
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
    decoding: dict[str, Any] = {"do_sample": bool(temperature), "repetition_penalty": 1.0}
    if temperature:
        decoding["temperature"] = temperature
    streamer = Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    model.generate(**inputs.to(model.device), max_new_tokens=length, streamer=streamer, **decoding)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__.splitlines()[0])
    parser.add_argument("run", help="a run directory")
    parser.add_argument("question", nargs="?", help="a single question; default: questions are read line by line")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0, which takes the likeliest tokens")
    parser.add_argument("--length", type=int, help="tokens of the longest answer; default: as in the run")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    try:
        run = read_run(Path(args.run))
        length = args.length or run.config.train.max_completion_length
        prompt_of("", run)
        from grpo import policy

        model, tokenizer = policy.load(run.model, run.config.model)
        if args.question is not None:
            answer(args.question, run, model, tokenizer, length, args.temperature)
            return
        print("Ask one question per line; Ctrl-D ends the conversation.")
        while True:
            answer(input("> "), run, model, tokenizer, length, args.temperature)
    except ConfigError as error:
        leave(error, PROGRAM)
    except (EOFError, KeyboardInterrupt):
        print()


if __name__ == "__main__":
    main()
