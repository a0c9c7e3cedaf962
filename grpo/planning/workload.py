"""What a run's memory follows from, beside the shape of its model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Adapter:
    """LoRA matrices on some of a model's linear modules."""

    rank: int
    modules: tuple[str, ...] | None = None
    """Names such as `q_proj`; None for all linear modules but the output embedding."""
    number_bytes: int = 4
    """PEFT holds adapters in float32, TRL those of a quantized base in bfloat16."""


@dataclass(frozen=True)
class Job:
    """What a run's memory follows from, beside the shape of its model; lengths and rows are those of one device."""

    prompt: int
    """Tokens of the longest prompt."""
    completion: int
    """Tokens of the longest completion."""
    rows: int
    """Completions that are generated at once."""
    tokens: int
    """`max_tokens_per_microbatch`: tokens that go through the policy at once in the update, never less than a row."""
    completions_a_sequence: int = 1
    """With `share_prompts`: how many completions can stand behind one prompt."""
    weight_bytes: float = 2
    """Of a number in the weights as they are loaded."""
    compute_bytes: int = 2
    """Of a number in the activations."""
    quantized: int = 0
    """Bits of a number in the linear modules' weights: 4 (NF4, 2305.14314) or 8, 0 if they are not quantized."""
    double_quantized: bool = True
    adapter: Adapter | None = None
    optimizer: str = "adamw_torch"
    """A name of transformers' `OptimizerNames`."""
    checkpointing: bool = False
    reference: bool = False
    """Whether a second copy of the weights is the reference of a KL penalty."""
    gradients_on_host: bool = False
    """`update.gradients_on_host`: only the gradient at hand is on the device."""
    vllm_share: float = 0.0
    """vLLM's share of the card; 0 when it is not on this card."""
    vllm_sleeps: bool = False
    vllm_shards: int = 1
    """Over how many devices vLLM spreads its copy of the weights (tensor parallelism)."""
    on_server: bool = False
    """Whether a vLLM server elsewhere generates, and gets the weights."""
    card: float = 0.0
    """Bytes of the whole card, of which vLLM takes its share."""
    sampling_filter: bool = False
    """Whether top-k, top-p or min-p sorts the vocabulary."""
    device: str = "cuda"
    processes: int = 1
    """On this machine, each with a device of its own."""
    weight_shards: int = 1
    gradient_shards: int = 1
    optimizer_shards: int = 1
    """Over how many devices FSDP or ZeRO spreads each of these."""
    float32_training: bool = False
    """Whether weights in half precision are trained by a copy in float32, as FSDP and ZeRO do."""
    offload_weights: bool = False
    offload_optimizer: bool = False
    """Whether weights, gradients and optimizer state wait in host memory."""

    @property
    def row(self) -> int:
        """Tokens of the longest row."""
        return self.prompt + self.completion

    @property
    def microbatch(self) -> int:
        """Tokens of the largest micro-batch: what is allowed, or one row that exceeds it."""
        return max(self.tokens, self.row)

    @property
    def sequence(self) -> int:
        """Tokens of the longest sequence that goes through the policy: a row, or a prompt with its completions."""
        return min(self.prompt + self.completions_a_sequence * self.completion, self.microbatch)

    @property
    def scored(self) -> int:
        """Tokens of the largest micro-batch that the head scores: on a GPU those of completions, else all."""
        if self.device == "cpu":
            return self.microbatch
        completions = self.completions_a_sequence * self.completion
        return -(-self.microbatch * completions // (self.prompt + completions))
