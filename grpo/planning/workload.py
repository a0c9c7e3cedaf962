"""A run's workload: lengths, counts and methods that its memory follows from, beside the shape of its model."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo.planning.shape import Shape


@dataclass(frozen=True)
class Adapter:
    """LoRA matrices on some of a model's linear modules."""

    rank: int
    """Rank of the two matrices that a linear module gets."""
    modules: tuple[str, ...] | None = None
    """Names of the adapted modules, such as `q_proj`; None for all linear modules but the output embedding."""
    parameters: tuple[str, ...] = ()
    """Ends of the names of adapted parameters, such as `experts.down_proj` (`peft.target_parameters`)."""
    vision: bool = False
    """Whether the vision tower and the projector have adapters too (`peft.vision`)."""
    size: int = 4
    """Bytes per parameter, gradient and number of the optimizer's state."""
    dropout: bool = False
    """Whether dropout precedes the adapter (`peft.lora_dropout`), which keeps a mask of its input."""

    casts: bool = False
    """Whether each adapted module casts its input, as PEFT does; our trainer does so for variants of LoRA alone."""

    @property
    def copies(self) -> bool:
        """Whether each adapted module keeps a copy of its input."""
        return self.dropout or self.casts

    def adapts(self, module: str) -> bool:
        """Whether linear modules of a name get an adapter."""
        return self.modules is None or module in self.modules


@dataclass(frozen=True)
class Images:
    """The images of prompts, an image per prompt."""

    per_generation: int
    """Number of completions whose images are on the device at once: the completions of a generation."""
    per_step: int
    """Number of completions per optimizer step and device."""
    opened: int = 1
    """Number of images that are open at once in host memory: the distinct images of a generation."""
    max_pixels: int | None = None
    """`task.max_pixels`: width times height of the largest image; None for as large as the prompt's tokens allow."""


@dataclass(frozen=True)
class Sharding:
    """The division by FSDP2 or DeepSpeed over the processes of all machines; by default none, as in DDP."""

    library: str = ""
    """`fsdp`, `deepspeed`, or empty for DDP."""
    stage: int = 0
    """Stage of ZeRO (1910.02054): optimizer state (1), gradients too (2), weights too (3). 2 with FSDP2 is
    `reshard_after_forward=false`: weights are divided, and unsharded until the backward pass is over."""
    processes: int = 1
    """Processes on all machines, each with a device of its own."""
    float32: bool = False
    """Whether weights are trained in float32 and computed with in half precision."""
    offload_weights: bool = False
    """Whether the weights are offloaded to CPU."""
    offload_optimizer: bool = False
    """Whether gradients and optimizer state are offloaded to CPU."""
    gathers_to_generate: bool = False
    """Whether all weights are unsharded on every device while it generates (`train.ds3_gather_for_generation`)."""
    live_parameters: float = 1e9
    """DeepSpeed's `stage3_max_live_parameters`: parameters that stay unsharded between their uses."""
    bucket: float | None = 5e8
    """DeepSpeed's `reduce_bucket_size`, numbers in the buffer that reduces gradients; None (`auto`): hidden size^2."""

    @property
    def weight_shards(self) -> int:
        """Devices over which the weights are divided."""
        return self.processes if self.stage == 3 or (self.library == "fsdp" and self.stage) else 1

    @property
    def is_zero3(self) -> bool:
        """Whether DeepSpeed divides the weights, which all processes then gather together at each use."""
        return self.library == "deepspeed" and self.stage == 3

    @property
    def gradient_shards(self) -> int:
        """Devices over which the gradients are divided."""
        return self.processes if self.stage >= 2 else 1

    @property
    def optimizer_shards(self) -> int:
        """Devices over which optimizer state and float32 copies are divided."""
        return self.processes if self.stage >= 1 else 1


@dataclass(frozen=True)
class Workload:
    """A run's lengths, counts and methods per device, and its processes per machine."""

    prompt: int
    """Length of the longest prompt, tokens."""
    completion: int
    """Length of the longest completion, tokens."""
    sequences: int
    """Completions that are generated at once."""
    tokens: int
    """`update.max_tokens_per_microbatch`: tokens per micro-batch; a longer sequence is a micro-batch of its own."""
    images: Images | None = None
    """Images of the prompts; None for text alone."""
    freeze: tuple[str, ...] = ()
    """Parts of a vision-language model that are not trained: `vision`, `projector`."""
    completions_per_prompt: int = 1
    """Completions of a group, for which transformers reads the prompt once."""
    shares_keys: bool = True
    """Whether completions share their prompt's keys in a CPU's generation, if no layer has a window."""
    completions_per_sequence: int = 1
    """Number of completions behind a copy of their prompt: the group size with `update.share_prompts`, else 1."""
    weight_bytes: float = 2
    """Bytes per weight, as loaded and before quantization."""
    compute_bytes: int = 2
    """Bytes per number in the activations."""
    quantized: int = 0
    """Bits per weight of the linear modules: 4 (NF4, 2305.14314) or 8, 0 if they are not quantized."""
    double_quantized: bool = True
    """Whether the scales of 4-bit weights are quantized too."""
    adapter: Adapter | None = None
    """LoRA adapter that is trained; None if all weights are."""
    optimizer: str = "adamw_torch"
    """A name of transformers' `OptimizerNames`."""
    checkpointing: bool = False
    """Whether layers keep only their input and are recomputed in the backward pass."""
    activations_on_host: bool = False
    """`update.activations_on_host`: the inputs of checkpointed layers are offloaded to CPU."""
    mlp_tile: int = 0
    """`update.mlp_tile`: tokens that a dense feed-forward layer computes at once; 0 for all."""
    masks: bool = True
    """Whether several sequences of a micro-batch have a mask; FlashAttention needs none."""
    reference: bool = False
    """Whether a second copy of the weights is the reference of a KL penalty."""
    gradients_on_host: bool = False
    """`update.gradients_on_host`: gradients are offloaded to CPU; the device holds one gradient at a time."""
    reward_models: "tuple[tuple[Shape, int], ...]" = ()
    """Shape of each reward model, and bytes per number in it."""
    vllm_fraction: float = 0.0
    """vLLM's fraction of the device's memory; 0 where vLLM runs elsewhere or not at all."""
    vllm_sleeps: bool = False
    """Whether vLLM frees its memory while the policy is trained."""
    shares_weights: bool = False
    """Whether the policy's frozen weights are vLLM's, in its share."""
    vllm_fp8: bool = False
    """Whether vLLM quantizes its linear modules to 8 bits (`engine.quantization`)."""
    vllm_shards: int = 1
    """Devices over which vLLM spreads its copy of the weights (tensor parallelism)."""
    on_server: bool = False
    """Whether a vLLM server elsewhere generates and receives the weights."""
    sends_adapter: bool = False
    """Whether vLLM gets the adapter alone, and no weights."""
    gpu_memory: float = 0.0
    """Memory of the device in all, bytes: the base of vLLM's fraction."""
    sampling_filter: bool = False
    """Whether top-k, top-p or min-p sorts the vocabulary."""
    device: str = "cuda"
    """`cuda` or `cpu`."""
    processes: int = 1
    """Processes on this machine, each with a device of its own."""
    sharding: Sharding = Sharding()
    """Division by FSDP2 or DeepSpeed over the processes of all machines."""

    @property
    def sequence(self) -> int:
        """Length of the longest prompt with a completion, tokens."""
        return self.prompt + self.completion

    @property
    def prompts_at_once(self) -> int:
        """Distinct prompts of the completions that are generated at once."""
        return -(-self.sequences // self.completions_per_prompt)

    @property
    def microbatch(self) -> int:
        """Size of the largest micro-batch, tokens: the limit, or a single sequence that exceeds it."""
        return max(self.tokens, self.sequence)

    @property
    def masked(self) -> int:
        """Length of the longest of several sequences in a micro-batch, tokens; padded, they have a mask."""
        return min(self.sequence, self.tokens // 2) if self.masks else 0

    def scored(self, tokens: int) -> int:
        """Tokens of a micro-batch in the head, which scores completions alone."""
        completions = self.completions_per_sequence * self.completion
        return -(-tokens * completions // (self.prompt + completions))
