"""Ask a trained policy: `python -m grpo.chat RUN_DIR "What is 12 + 30?"`, or without a question a conversation.

Prompts are built as in the run, with its system prompt and examples. In a conversation `/adapter RUN` asks the adapter
of another run or checkpoint on the same base, which stays loaded.
"""

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

from grpo.cli import leave, quick_imports
from grpo.rundir.history import named_run
from grpo.rundir.run_dir import Run, is_run, read_run
from grpo.utils.errors import ConfigError, described
from rewards.text import printable

PROGRAM = "grpo.chat"
SWITCH = "/adapter"
BASE = "base"


class Adapters:
    """Adapters of a loaded base, of which one answers, or none.

    Args:
        model: as `policy.load` returns it, with the adapter that is in `folder`.
        folder: a model or a checkpoint of a run.
    """

    def __init__(self, model: Any, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.loaded = {folder.resolve(): "default"}

    def switch(self, word: str) -> str:
        """Switch to an adapter and return its folder: of a run, of a checkpoint, or `base` for the base alone.

        Raises:
            ConfigError: there is no adapter, it is of another base, or it cannot be loaded.
        """
        from grpo.model.policy import adapter_config

        if not hasattr(self.model, "peft_config"):
            raise ConfigError(
                f"{SWITCH}: {self.folder} has no adapter, all weights were trained; start with another run"
            )
        if word == BASE:
            self.model.base_model.disable_adapter_layers()
            return f"{BASE}, without an adapter"
        place = named_run(word)
        folder = read_run(place).model if is_run(place) else place
        if (config := adapter_config(folder)) is None:
            raise ConfigError(f"{word}: neither a run nor a checkpoint with an adapter")
        base, loaded = (name_of_base(of) for of in (config, adapter_config(self.folder)))
        if base != loaded:
            raise ConfigError(f"{folder}: an adapter of {base!r}, and {loaded!r} is loaded")
        if (key := folder.resolve()) not in self.loaded:
            self._load(folder, name := f"adapter_{len(self.loaded)}")
            self.loaded[key] = name
        self.model.base_model.enable_adapter_layers()
        self.model.set_adapter(self.loaded[key])
        return str(folder)

    def _load(self, folder: Path, name: str) -> None:
        try:
            self.model.load_adapter(folder, name)
        except Exception as error:  # of PEFT, of safetensors, of torch
            if name in self.model.peft_config:
                self.model.delete_adapter(name)
            raise ConfigError(f"{folder}: the adapter cannot be loaded ({described(error)})") from error


def name_of_base(config: Any) -> str:
    """Return the base of an adapter: its name on the hub, or the path of its folder."""
    name = str(config.get("base_model_name_or_path"))
    return str(Path(name).resolve()) if Path(name).exists() else name


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

        model, processing_class = policy.load(
            run.model, run.config.model, template=template_of(run.config), merge=False
        )
        adapters, base = Adapters(model, run.model), model.get_base_model() if hasattr(model, "peft_config") else model
        images = images_of(args.image, run, processing_class) if args.image else []

        def ask(question: str) -> None:
            prompt = prompt_of(question, run)
            if images:
                prompt = prepare_multimodal_messages(prompt, images)
            answer(prompt, base, processing_class, length, args.temperature)

        if args.question is not None:
            ask(args.question)
            return
        switches = f"{SWITCH} RUN switches to its adapter; " if hasattr(model, "peft_config") else ""
        print(f"Ask one question per line; {switches}Ctrl-D ends the conversation.")
        while True:
            command, _, word = (line := input("> ")).partition(" ")
            if command.startswith("/") and command != SWITCH:
                print(f"{PROGRAM}: {command!r} is no command; there is {SWITCH} RUN", file=sys.stderr)
                continue
            if command != SWITCH:
                ask(line)
                continue
            try:
                print(f"adapter: {adapters.switch(word.strip() or str(run.folder))}")
            except (OSError, ValueError) as error:
                print(f"{PROGRAM}: {error}", file=sys.stderr)
    except ConfigError as error:
        leave(error, PROGRAM)
    except (EOFError, KeyboardInterrupt):
        print()


if __name__ == "__main__":
    main()
