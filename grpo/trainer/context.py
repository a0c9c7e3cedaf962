"""The surroundings of a trainer in a run of `grpo.train`; a script needs none of them."""

from collections import Counter
from dataclasses import dataclass, field

from grpo.trainer.measurements import MemoryReadings
from grpo.trainer.rollout.tool_calls import Counts
from grpo.view.images import View
from grpo.view.stream import Stream


@dataclass(frozen=True)
class Context:
    """Where a trainer's problems come from, and what it logs beside TRL's metrics."""

    stream: Stream | None = None
    """Problems that are read while the run trains, of which `train_dataset` has the numbers, unshuffled."""
    view: View | None = None
    """Opens the images of each generation, once each; None where the data has them open."""
    most_images: int | None = None
    """Images of a prompt at most, for an engine of vLLM; None if it is not known."""
    memory: MemoryReadings | None = None
    """Gets the readings; None for new ones."""
    keep_columns: bool = False
    """Whether `completions/` gets the columns of the data, and small images, as well."""
    log_tokens: bool = False
    """Whether `completions/` gets values per token of some completions, see `grpo.trainer.update.token_values`."""
    tool_counts: Counts = field(default=lambda: (Counter(), Counter()))
    """Returns calls and errors of this process so far, by tool."""
    correct: str | None = None
    """Name of the reward that is 1 for a correct completion, and 0 for others; the first if None."""
