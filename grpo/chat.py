"""Ask a trained policy: `python -m grpo.chat RUN_DIR "What is 12 + 30?"`, or without a question a conversation.

Prompts are built as in the run, with its system prompt and examples. In a conversation `/adapter RUN` asks the adapter
of another run or checkpoint on the same base, which stays loaded.
"""

import argparse
import logging

from grpo.cli import leave, quick_imports
from grpo.extras.chat.prompts import prompt_of
from grpo.rundir.history import named_run
from grpo.rundir.run_dir import read_run
from grpo.utils.errors import ConfigError

PROGRAM = "grpo.chat"


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

            from grpo.extras.chat.adapters import Adapters, converse
            from grpo.extras.chat.answers import answer, images_of
            from grpo.model import policy
            from grpo.model.thinking import template_of

        model, processing_class = policy.load(
            run.model, run.config.model, template=template_of(run.config), merge=False
        )
        base = model.get_base_model() if hasattr(model, "peft_config") else model
        images = images_of(args.image, run, processing_class) if args.image else []

        def ask(question: str) -> None:
            prompt = prompt_of(question, run)
            if images:
                prompt = prepare_multimodal_messages(prompt, images)
            answer(prompt, base, processing_class, length, args.temperature)

        if args.question is not None:
            ask(args.question)
        else:
            converse(ask, Adapters(model, run.model), run.folder, PROGRAM)
    except ConfigError as error:
        leave(error, PROGRAM)
    except (EOFError, KeyboardInterrupt):
        print()


if __name__ == "__main__":
    main()
