"""The shape of a model: the numbers of an architecture that its memory follows from."""

from collections.abc import Mapping
from dataclasses import dataclass

from grpo.planning.altup import AltUp
from grpo.planning.delta_net import DeltaNet
from grpo.planning.families import (
    EAGER,
    FUSED_GATE,
    FUSED_QKV,
    GATED,
    PARALLEL,
    QK_NORM,
    QKV_BIAS,
    SANDWICH,
    UNGATED,
)
from grpo.planning.latent import Latent
from grpo.planning.mamba2 import Mamba2
from grpo.planning.per_layer import PerLayer
from grpo.planning.short_convolution import ShortConvolution
from grpo.planning.vision import Vision

Recurrent = DeltaNet | Mamba2 | ShortConvolution
Linears = Mapping[str, tuple[float, float, int]]
"""Linear modules by name: inputs and outputs, means over their layers, and their count."""


@dataclass(frozen=True)
class Shape:
    """A decoder of transformer layers with its vision part; fields have the names of Hugging Face configurations."""

    model_type: str
    """Family, such as `llama`."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: float
    """Width of a dense feed-forward layer, a mean over the layers."""
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Width of an attention head."""
    vocab_size: int
    tie_word_embeddings: bool = False
    num_experts: int = 0
    """Experts per mixture; 0 for a dense model."""
    num_experts_per_tok: int = 0
    """Routed experts per token."""
    moe_intermediate_size: int = 0
    """Width of an expert."""
    shared_expert_intermediate_size: int = 0
    """Width of the shared expert that every token goes through; 0 without."""
    num_dense_layers: int = 0
    """Dense layers of a model whose other layers are mixtures of experts."""
    sliding_window: int = 0
    """Tokens that a layer with a sliding window attends to; 0 without."""
    num_sliding_layers: int = 0
    """Layers with a sliding window."""
    global_head_dim: int = 0
    """Width of an attention head in layers without a window, if it is another there (Gemma 4)."""
    num_global_key_value_heads: int = 0
    """Number of heads of keys and values in layers without a window, if it is another there."""
    num_kv_shared_layers: int = 0
    """Last layers, which read the keys and values of earlier ones (Gemma 3n and 4)."""
    attention_k_eq_v: bool = False
    """Whether in layers without a window the values are the keys."""
    latent: Latent | None = None
    """Attention by latents."""
    per_layer: PerLayer | None = None
    """Embeddings for each layer."""
    altup: AltUp | None = None
    """Several residual streams."""
    recurrent: Recurrent | None = None
    """Layers that keep a state in the place of attention."""
    max_position_embeddings: int = 0
    """Tokens of the longest sequence that the model was made for; 0 if it is not known."""
    given_parameters: int = 0
    """Number of parameters if it is known; 0 to compute it from the shape."""
    vision: Vision | None = None
    """Vision tower and projector of a model that takes images, as far as the plan knows them."""
    audio_parameters: int = 0
    """Parameters of an audio tower, which no text or image reaches."""
    takes_images: bool = False
    """Whether the model takes images beside text."""

    @property
    def query_width(self) -> float:
        """Width of a token's queries, all heads; a mean over the layers."""
        if self.latent:
            return self.latent.query_width
        wider = (self.global_head_dim - self.head_dim) * self.global_layers / max(1, self.attention_layers)
        return self.num_attention_heads * (self.head_dim + (wider if self.global_head_dim else 0))

    @property
    def kv_width(self) -> float:
        """Width of a token's keys, and of its values, all heads; a mean over the layers, of which some have none."""
        if self.latent:
            return (self.latent.query_width + self.latent.value_width) / 2
        sliding, full = self.caching_layers
        return (sliding * self.sliding_kv_width + full * self.global_kv_width) / max(1, self.attention_layers)

    @property
    def sliding_kv_width(self) -> int:
        """Width of a token's keys in a layer with a window."""
        return self.num_key_value_heads * self.head_dim

    @property
    def global_kv_width(self) -> int:
        """Width of a token's keys in a layer without a window."""
        heads = self.num_global_key_value_heads or self.num_key_value_heads
        return heads * (self.global_head_dim or self.head_dim)

    @property
    def global_layers(self) -> int:
        """Number of layers that attend to everything."""
        return self.attention_layers - self.num_sliding_layers

    @property
    def caching_layers(self) -> tuple[int, int]:
        """Numbers of layers with a window, and without, that have keys and values of their own."""
        caching = self.attention_layers - self.num_kv_shared_layers
        sliding = self.num_sliding_layers * caching // max(1, self.attention_layers)
        return sliding, caching - sliding

    @property
    def attention_layers(self) -> int:
        """Number of layers that have keys and values."""
        without = self.recurrent.layers if self.recurrent and self.model_type not in PARALLEL else 0
        return self.num_hidden_layers - without

    @property
    def active_width(self) -> float:
        """Width of the feed-forward layer that a token goes through, summed over its experts."""
        if not self.num_experts:
            return self.intermediate_size
        mixture = self.num_experts_per_tok * self.moe_intermediate_size + self.shared_expert_intermediate_size
        return max(mixture, self.intermediate_size if self.num_dense_layers else 0)

    @property
    def embeddings(self) -> int:
        """Parameters of the token embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def mixtures(self) -> int:
        """Number of layers that are mixtures of experts."""
        return self.num_hidden_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def experts(self) -> int:
        """Parameters of the experts of a mixture, which transformers holds as two tensors."""
        return 3 * self.num_experts * self.moe_intermediate_size * self.hidden_size

    @property
    def vision_parameters(self) -> int:
        """Parameters of the vision tower and the projector."""
        return self.vision.parameters_of("vision", "projector") if self.vision else 0

    def linears(self) -> Linears:
        """Return the linear modules of the language model without experts: inputs, outputs and count of each name."""
        hidden, layers = self.hidden_size, self.num_hidden_layers
        modules: dict[str, tuple[float, float, int]] = {**self.attention_linears()}
        if self.recurrent:
            modules |= self.recurrent.linears(hidden)
        width = self.shared_expert_intermediate_size if self.num_experts else self.intermediate_size
        if width:
            layers = self.mixtures or layers
            inner = {"gate_proj": (hidden, width, layers), "up_proj": (hidden, width, layers)}
            if self.model_type in UNGATED:
                del inner["gate_proj"]
            if self.model_type in FUSED_GATE:
                inner = {"gate_up_proj": (hidden, 2 * width, layers)}
            modules |= {**inner, "down_proj": (width, hidden, layers)}
        if self.shared_expert_intermediate_size and self.model_type.startswith("qwen"):
            modules["shared_expert_gate"] = (hidden, 1, self.mixtures)
        if self.per_layer:
            modules |= self.per_layer.linears(hidden)
        if self.altup:
            modules |= self.altup.linears(hidden)
        return modules

    def attention_linears(self) -> Linears:
        """Return those of attention."""
        hidden, layers = self.hidden_size, self.attention_layers
        if self.latent:
            return self.latent.linears(hidden, layers)
        output = {"o_proj": (self.query_width, hidden, layers)}
        if self.model_type in FUSED_QKV:
            return {"qkv_proj": (hidden, self.query_width + 2 * self.kv_width, layers), **output}
        sliding, full = self.caching_layers
        keys = self.kv_width * layers / max(1, sliding + full)
        values = keys - (self.global_kv_width * full / (sliding + full) if self.attention_k_eq_v else 0)
        return {
            "q_proj": (hidden, self.query_width * (2 if self.model_type in GATED else 1), layers),
            "k_proj": (hidden, keys, sliding + full),
            "v_proj": (hidden, values, sliding + full),
            **output,
        }

    def all_linears(self) -> list[tuple[float, float, int]]:
        """Return inputs, outputs and count of the linear modules of all parts of the model, without experts."""
        vision = [*self.vision.linears().values(), *self.vision.projector_linears().values()] if self.vision else []
        return [*self.linears().values(), *vision]

    def parameters(self) -> int:
        """Return the number of parameters; tied parameters count once."""
        if self.given_parameters:
            return self.given_parameters
        hidden, layers = self.hidden_size, self.num_hidden_layers
        linear = sum(inputs * outputs * count for inputs, outputs, count in self.linears().values())
        experts = self.mixtures * (self.experts + self.num_experts * hidden)  # and their router
        dense = self.num_dense_layers * 3 * self.intermediate_size * hidden if self.num_experts else 0
        norms: float = ((4 if self.model_type in SANDWICH else 2) * layers + 1) * hidden
        if self.model_type in QK_NORM:
            sliding, full = self.caching_layers
            norms += sliding * self.head_dim + full * (self.global_head_dim or self.head_dim)  # of keys
            norms += self.query_width / self.num_attention_heads * self.attention_layers
        norms += self.latent.other_parameters() * self.attention_layers if self.latent else 0
        norms += self.per_layer.other_parameters(hidden) if self.per_layer else 0
        norms += self.altup.other_parameters(hidden) if self.altup else 0
        norms += self.recurrent.other_parameters() if self.recurrent else 0
        biases = layers * (self.query_width + 2 * self.kv_width) if self.model_type in QKV_BIAS else 0
        if self.model_type in EAGER:  # of the output, the router and the experts; and a sink per head
            of_experts = self.num_experts * (1 + 2 * self.moe_intermediate_size + hidden)
            biases += layers * (hidden + self.num_attention_heads + of_experts)
        embeddings = self.embeddings * (1 if self.tie_word_embeddings else 2)
        language = round(embeddings + linear + experts + dense + norms + biases)
        return language + self.vision_parameters + self.audio_parameters
