"""The options of the trainer: the groups `update`, `engine` and `rollout`, and the means of losses.

`from grpo.trainer import ExactGRPOTrainer` in a script loads neither Hydra nor OmegaConf.
"""

from dataclasses import dataclass
from typing import Any

LOSS_MEANS = {
    "grpo": "sequences",
    "sapo": "sequences",
    "dr_grpo": "sequences",
    "luspo": "sequences",
    "bnpo": "tokens",
    "dapo": "generation",
    "cispo": "generation",
    "vespo": "generation",
}
"""The set over which TRL averages each `loss_type`: the sequences or the tokens of a slice, or all tokens of a
generation, a number that is the same for every micro-batch. Other losses are not divided into micro-batches."""
FP8 = ("fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
"""vLLM's names of its online quantization to 8-bit floating point; `fp8` is `fp8_per_tensor`."""
VLLM = "grpo.generation.vllm.engine.PolicyEngine"
"""`engine.backend`: vLLM, in this process or a server."""


@dataclass(frozen=True)
class Mixture:
    """Several tasks in a run; the column `task` of the data has the name of each problem's task."""

    weights: dict[str, float]
    """Prompts of each task in a step, relative to those of the others."""
    limits: dict[str, int]
    """Tokens of the longest completion of each task."""
    graders: dict[str, str | None]
    """Name of the reward that is 1 for a correct completion of each task; None if no reward of the run is."""


@dataclass
class Update:
    """Computation of the gradient of an optimizer step from its rollouts."""

    max_tokens_per_microbatch: Any = "auto"
    """Tokens, with padding, that go through the policy at once. `auto` takes the plan's number; without a plan it
    begins with the longest possible sequence and grows while GPU memory allows. A longer sequence is computed alone."""
    skip_zero_advantage: bool = True
    """Skip completions that add exactly nothing to the gradient: their advantage is zero, and neither KL penalty nor
    an entropy bonus acts on them."""
    share_prompts: bool = True
    """Compute a prompt once for all its completions if that is cheaper and the architecture allows it."""
    gradients_on_host: bool = False
    """Offload gradients to CPU, so that the GPU holds one gradient at a time: the same result, slower."""
    activations_on_host: bool = False
    """Offload the inputs of checkpointed layers to CPU between forward and backward pass: bitwise the same result,
    longer sequences. Needs `train.gradient_checkpointing`."""
    mlp_tile: int | None = None
    """Tokens that a dense feed-forward layer computes at once, for example 4096; each tile is computed again in the
    backward pass: the same result, longer sequences, slower. `null`: all tokens of a micro-batch."""
    compile: Any = "auto"
    """Compile the decoder layers with `torch.compile`, once for all lengths: less time, and the same result within
    rounding. `true`, `false`, or `auto`: on NVIDIA and AMD GPUs, unless the plan expects updates to be over before it
    pays."""
    on_oom: str = "retry"
    """On OOM in the update: `retry` the step from the same rollouts with half the tokens, or `raise`."""
    max_skipped_steps: int = 5
    """Consecutive steps with a gradient that is not finite, none of which changes the policy, before the run stops."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: a wrong value; the message has the key, its value and the possible values.
        """
        tokens = self.max_tokens_per_microbatch
        if tokens != "auto" and (type(tokens) is not int or tokens < 1):
            raise ValueError(f"update.max_tokens_per_microbatch={tokens}: `auto`, or a positive number of tokens")
        if self.mlp_tile is not None and self.mlp_tile < 1:
            raise ValueError(f"update.mlp_tile={self.mlp_tile}: a positive number of tokens, or null")
        if self.compile not in ("auto", True, False):
            raise ValueError(f"update.compile={self.compile}: `auto`, `true` or `false`")
        if self.on_oom not in ("retry", "raise"):
            raise ValueError(f"update.on_oom={self.on_oom}: `retry` or `raise`")
        if self.max_skipped_steps < 1:
            raise ValueError(f"update.max_skipped_steps={self.max_skipped_steps}: a positive number of steps")


@dataclass
class Engine:
    """Transfer of weights between policy and vLLM."""

    lora: str = "adapter"
    """Transfer from a policy with LoRA to vLLM before each generation: the `adapter`, or all weights with the adapter
    `merged` in. The run merges adapters that vLLM's LoRA does not support, and prints the reason."""
    share_weights: Any = "auto"
    """Whether policy and colocated vLLM engine share the frozen weights: `true`, `false`, or `auto`, which shares them
    if that is possible and the engine does not sleep. Needs `lora: adapter`."""
    backend: str = VLLM
    """Dotted path of the class that generates if `train.use_vllm` is true: a `grpo.generation.backend.Backend`.
    """
    quantization: str | None = None
    """Quantization of a colocated vLLM's frozen weights while it loads them, beside an adapter: `fp8_per_channel` (on
    any device), `fp8`, `fp8_per_tensor` or `fp8_per_block` (on GPUs); `null` for the policy's data type. TRL's
    importance-sampling correction makes up for the difference."""
    drafts: str | None = None
    """Drafts of a colocated vLLM: `ngram` drafts tokens that followed the same tokens before and checks several at
    once, which changes no distribution; it ends after a few generations if they are slower with it. `null`: none."""
    staleness: int = 0
    """Largest number of updates between the policy that begins a rollout and the policy that learns from it. A vLLM
    server makes the rollouts of so many further steps, and their rewards are computed, while the policy trains; TRL's
    importance-sampling correction makes up for it."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: a wrong value; the message has the key, its value and the possible values.
        """
        if self.lora not in ("adapter", "merged"):
            raise ValueError(f"engine.lora={self.lora}: `adapter` or `merged`")
        if self.share_weights not in ("auto", True, False):
            raise ValueError(f"engine.share_weights={self.share_weights}: `auto`, `true` or `false`")
        if self.quantization not in (None, *FP8):
            raise ValueError(f"engine.quantization={self.quantization}: null, or one of {', '.join(FP8)}")
        if self.drafts not in (None, "ngram"):
            raise ValueError(f"engine.drafts={self.drafts}: null or ngram")
        if self.staleness < 0:
            raise ValueError(f"engine.staleness={self.staleness}: 0, or a number of updates")


@dataclass
class Rollout:
    """Which problems a step learns from, and how the rewards of a group become advantages."""

    dynamic_sampling: bool = False
    """Replace zero-variance groups by groups of further problems."""
    max_rounds: int = 5
    """Largest number of generations per step; zero-variance groups fill the batch afterwards."""
    prioritize: bool = False
    """Take problems with 20 to 80 % correct completions four times as often as others; of a mixture, in each task."""
    pass_at_k: int | None = None
    """Learn by the best of this number of completions, instead of each: rewards of 0 and 1 become pass@k. `null` does
    not."""
    max_repetition: float | None = None
    """Skip completions in which a larger fraction of the 4-grams of tokens has occurred before, 0 to 1; `null` skips
    none."""
    completions_at_once: int | None = None
    """Number of completions that transformers generates at once on a device; the others wait for free places. `null`
    takes the plan's number, and without a plan all completions. An OOM halves it."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: naming the key and its value.
        """
        if self.max_rounds < 1:
            raise ValueError(f"rollout.max_rounds={self.max_rounds}: at least 1")
        if self.max_repetition is not None and not 0 <= self.max_repetition < 1:
            raise ValueError(f"rollout.max_repetition={self.max_repetition:g}: a fraction from 0 to below 1, or null")
        if self.completions_at_once is not None and self.completions_at_once < 1:
            raise ValueError(f"rollout.completions_at_once={self.completions_at_once}: at least 1, or null")


def steps_in_backward(optim: str) -> bool:
    """Return whether an optimizer, as `train.optim` names it, steps during the backward pass of each slice."""
    return "lomo" in optim or optim.endswith("_layerwise")
