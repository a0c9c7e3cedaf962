"""Adapters of a loaded base, and a conversation that switches between them."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo.model.policy import adapter_config
from grpo.rundir.history import named_run
from grpo.rundir.run_dir import is_run, read_run
from grpo.utils.errors import ConfigError, described

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


def converse(ask: Callable[[str], None], adapters: Adapters, run: Path, program: str) -> None:
    """Answer questions line by line, until the input ends.

    Args:
        ask: prints the answer to a question.
        adapters: of the policy that answers.
        run: whose adapter answers first, and again after the command alone.
        program: begins the line of an error.
    """
    switches = f"{SWITCH} RUN switches to its adapter; " if hasattr(adapters.model, "peft_config") else ""
    print(f"Ask one question per line; {switches}Ctrl-D ends the conversation.")
    while True:
        command, _, word = (line := input("> ")).partition(" ")
        if command.startswith("/") and command != SWITCH:
            print(f"{program}: {command!r} is no command; there is {SWITCH} RUN", file=sys.stderr)
        elif command != SWITCH:
            ask(line)
        else:
            try:
                print(f"adapter: {adapters.switch(word.strip() or str(run))}")
            except (OSError, ValueError) as error:
                print(f"{program}: {error}", file=sys.stderr)
