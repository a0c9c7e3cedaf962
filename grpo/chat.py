"""Ask a trained policy: `python -m grpo.chat RUN_DIR "What is 12 + 30?"`, or without a question a conversation.

Prompts are built as in the run, with its system prompt and examples.
"""

import argparse
import logging
from pathlib import Path
from typing import Any

from grpo.cli import leave, quick_imports
from grpo.rundir.history import named_run
from grpo.rundir.run_dir import Run, read_run
from grpo.utils.errors import ConfigError
from rewards.text import printable

PROGRAM = "grpo.chat"


def prompt_of(question: str, run: Run) -> Any:
    """Return the prompt for a question, built as in the run; ConfigError if that takes several columns."""
    from grpo.data.prompts import columns_of, prompts_from, template_of

    if run.config.task.get("tasks"):
        raise ConfigError(
            f"{run.folder}: a run of several tasks, each with its own prompt; chat needs a run with one task"
        )
    prompt = run.config.task.prompt
    columns = [prompt] if prompt.isidentifier() else columns_of(template_of(run.config.task, ()), ())
    if len(set(columns)) != 1:
        raise ConfigError(f"task.prompt={prompt!r} is built from {len(columns)} columns, not from a question")
    return prompts_from(run.config.task, columns)({columns[0]: question})


def images_of(files: list[str], run: Run, processing_class: Any) -> list[Any]:
    """Return images as the run shows them; ConfigError if the run has none, or if an image cannot be opened."""
    from grpo.data.images import view_of

    view = view_of(run.config.task, processing_class)
    if view is None:
        raise ConfigError("--image: the run has no images, task.images=null")
    try:
        return [view.show(str(Path(file).absolute())) for file in files]
    except ValueError as error:
        raise ConfigError(f"--image: {error}") from error


def answer(prompt: Any, model: Any, processing_class: Any, length: int, temperature: float) -> None:
    """Print the policy's answer while it is generated; at most `length` tokens, greedily at temperature 0."""
    from transformers import TextStreamer

    from grpo.generation.transformers.completer import encode
    from grpo.generation.transformers.settings import decoding, only

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            super().on_finalized_text(printable(text), stream_end)

    inputs = encode(processing_class, [prompt]).to(model.device)
    options = decoding(model, processing_class, length, temperature)
    streamer = Streamer(processing_class, skip_prompt=True, skip_special_tokens=True)
    with only(model, options["generation_config"]):
        model.generate(**inputs, **options, streamer=streamer)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__.splitlines()[0])
    parser.add_argument("run", help="a run directory; latest: of the run that was started last")
    parser.add_argument("question", nargs="?", help="a single question; default: questions are read line by line")
    parser.add_argument("--image", action="append", help="an image to ask about; several times for several")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0, which takes the likeliest tokens")
    parser.add_argument("--length", type=int, help="tokens of the longest answer; default: as in the run")
    args = parser.parse_intermixed_args()  # the question may stand behind --image
    logging.basicConfig(level=logging.ERROR)
    try:
        run = read_run(named_run(args.run))
        length = args.length or run.config.train.max_completion_length
        prompt_of("", run)
        with quick_imports():
            from trl import prepare_multimodal_messages

            from grpo.model import policy
            from grpo.model.thinking import template_of

        model, processing_class = policy.load(run.model, run.config.model, template=template_of(run.config))
        images = images_of(args.image, run, processing_class) if args.image else []

        def ask(question: str) -> None:
            prompt = prompt_of(question, run)
            if images:
                prompt = prepare_multimodal_messages(prompt, images)
            answer(prompt, model, processing_class, length, args.temperature)

        if args.question is not None:
            ask(args.question)
            return
        print("Ask one question per line; Ctrl-D ends the conversation.")
        while True:
            ask(input("> "))
    except ConfigError as error:
        leave(error, PROGRAM)
    except (EOFError, KeyboardInterrupt):
        print()


if __name__ == "__main__":
    main()
