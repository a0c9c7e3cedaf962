"""Answers of a policy, printed while they are generated."""

from pathlib import Path
from typing import Any

from transformers import TextStreamer

from grpo.data.images import view_of
from grpo.generation.transformers.completer import encode
from grpo.generation.transformers.settings import decoding, only
from grpo.rundir.run_dir import Run
from grpo.utils.errors import ConfigError
from rewards.text import printable


class Printable(TextStreamer):
    """Prints a text token by token, without its control characters."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print a further part."""
        super().on_finalized_text(printable(text), stream_end)


def images_of(files: list[str], run: Run, processing_class: Any) -> list[Any]:
    """Return images as the run shows them; ConfigError if the run has none, or if an image cannot be opened."""
    view = view_of(run.config.task, processing_class)
    if view is None:
        raise ConfigError("--image: the run has no images, task.images=null")
    try:
        return [view.show(str(Path(file).absolute())) for file in files]
    except ValueError as error:
        raise ConfigError(f"--image: {error}") from error


def answer(prompt: Any, model: Any, processing_class: Any, length: int, temperature: float) -> None:
    """Print the policy's answer while it is generated; at most `length` tokens, greedily at temperature 0."""
    inputs = encode(processing_class, [prompt]).to(model.device)
    options = decoding(model, processing_class, length, temperature)
    streamer = Printable(processing_class, skip_prompt=True, skip_special_tokens=True)
    with only(model, options["generation_config"]):
        model.generate(**inputs, **options, streamer=streamer)
