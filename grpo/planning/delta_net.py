"""Gated DeltaNet (2412.06464): the numbers of a layer, and what transformers' own implementation keeps of it.

flash-linear-attention keeps less; where it is installed, the plan is an upper bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class DeltaNet:
    """The layers of a hybrid that keep a state; fields are those of Hugging Face configurations, without `linear_`."""

    layers: int
    """Number of such layers."""
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int = 4
    """Tokens that a convolution sees."""
    fused: bool = False
    """Whether fewer modules project the input (Qwen3-Next)."""
    chunk_size: ClassVar[int] = 64
    """Tokens of a chunk, within which tokens see each other by a matrix (transformers' `chunk_gated_delta_rule`)."""

    @property
    def key_width(self) -> int:
        """Width of a token's keys, all heads."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Width of a token's values, all heads."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_width(self) -> int:
        """Width of the convolution: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def state(self) -> int:
        """Numbers of the recurrent state of a sequence."""
        return self.num_value_heads * self.key_head_dim * self.value_head_dim

    def linears(self, hidden: int) -> dict[str, tuple[int, int, int]]:
        """Return the linear modules: inputs, outputs and count of each name."""
        heads, values = self.num_value_heads, self.value_width
        if self.fused:
            widths = {"in_proj_qkvz": self.conv_width + values, "in_proj_ba": 2 * heads}
        else:
            widths = {"in_proj_qkv": self.conv_width, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        inputs = {name: (hidden, width, self.layers) for name, width in widths.items()}
        return inputs | {"out_proj": (values, hidden, self.layers)}

    def other_parameters(self) -> int:
        """Return the number of parameters of all layers that are in no linear module."""
        of_heads = 2 * self.num_value_heads + self.value_head_dim  # decays, their biases, and a norm
        return self.layers * (self.conv_width * self.conv_kernel_dim + of_heads)

    def cache(self, size: int) -> int:
        """Return the bytes of the states of a sequence, whose recurrent ones are float32 numbers."""
        return self.layers * (4 * self.state + size * self.conv_width * self.conv_kernel_dim)

    def kept(self, size: int, adapter: bool) -> float:
        """Return the bytes per token that autograd keeps of a layer, but for the inputs of its projections.

        The rule is computed in float32. Under autocast each matrix product keeps copies of its inputs.

        Args:
            size: of a number in the computation, bytes.
            adapter: whether the weights are frozen.
        """
        copy = size if size < 4 else 0
        keys, values = self.num_value_heads * self.key_head_dim, self.value_width
        pairs, states = self.num_value_heads * self.chunk_size, self.state / self.chunk_size
        convolution = 2 * size * self.conv_width
        rule: float = keys * (24 + (7 * copy or 8)) + values * (8 + (2 * copy or 4))
        rule += pairs * (8 + (3 * copy or 12)) + states * (4 + 2 * copy)
        return convolution + rule + self.kept_of_norm(size, adapter)

    def kept_of_norm(self, size: int, adapter: bool) -> int:
        """Return those of the norm and the gate behind the rule."""
        return self.value_width * (8 + 4 + 2 * size + (0 if adapter else size))

    def working(self, size: int) -> float:
        """Return the bytes per token that a layer takes for a while without gradient."""
        keys, values = self.num_value_heads * self.key_head_dim, self.value_width
        projected = size * (2 * self.conv_width + 2 * keys + 2 * values)
        return projected + 4 * (5 * keys + 4 * values + 3 * self.num_value_heads * self.chunk_size)

    def gradients(self) -> float:
        """Return the bytes per token of the gradients that the backward pass of the rule holds at once."""
        keys, values = self.num_value_heads * self.key_head_dim, self.value_width
        return 4.0 * (4 * keys + 3 * values + self.num_value_heads * self.chunk_size)

    def operations(self) -> int:
        """Return the floating-point operations of a token in the rule of all layers: in its chunk, and by the state."""
        widths = 4 * self.num_value_heads * self.key_head_dim + 3 * self.value_width
        return self.layers * (self.chunk_size * widths + 6 * self.state)


def delta_net_of(text: Mapping[str, Any], layers: int) -> DeltaNet | None:
    """Return the gated DeltaNet of a text configuration with so many such layers; None without."""
    numbers = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    fields = {name: text[f"linear_{name}"] for name in numbers if f"linear_{name}" in text}
    if not layers or not {*numbers[:4]} <= fields.keys():
        return None
    return DeltaNet(layers, **fields, fused=text.get("model_type") == "qwen3_next")
