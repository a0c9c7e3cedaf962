"""Mamba 2 (2405.21060): the numbers of a layer, and what transformers' own implementation keeps of it.

The kernels of mamba-ssm keep less; where it is installed, the plan is an upper bound.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mamba2:
    """The layers of a hybrid with a state space; fields are those of Hugging Face configurations, without `mamba_`."""

    layers: int
    """Number of such layers."""
    n_heads: int
    d_head: int
    d_state: int
    """Numbers of the state per number of the input."""
    n_groups: int = 1
    """Groups of heads that share the matrices into and out of the state."""
    d_conv: int = 4
    """Tokens that a convolution sees."""
    chunk_size: int = 256
    """Tokens of a chunk, within which tokens see each other by a matrix."""
    rms_norm: bool = True
    """Whether a norm is behind the scan."""

    @property
    def width(self) -> int:
        """Width of a token's input, all heads."""
        return self.n_heads * self.d_head

    @property
    def conv_width(self) -> int:
        """Width of the convolution: the input, and the matrices into and out of the state."""
        return self.width + 2 * self.n_groups * self.d_state

    def linears(self, hidden: int) -> dict[str, tuple[int, int, int]]:
        """Return the linear modules: inputs, outputs and count of each name."""
        projected = self.width + self.conv_width + self.n_heads
        return {"in_proj": (hidden, projected, self.layers), "out_proj": (self.width, hidden, self.layers)}

    def other_parameters(self) -> int:
        """Return the number of parameters of all layers that are in no linear module."""
        norm = self.width if self.rms_norm else 0
        return self.layers * (self.conv_width * (self.d_conv + 1) + 3 * self.n_heads + norm)

    def cache(self, size: int) -> int:
        """Return the bytes of the states of a sequence, whose recurrent ones are float32 numbers."""
        return self.layers * (4 * self.width * self.d_state + size * self.conv_width * self.d_conv)

    def kept(self, size: int, adapter: bool) -> float:
        """Return the bytes per token that autograd keeps of a layer, but for the inputs of its projections.

        The scan is computed in float32. Under autocast each product keeps copies of its inputs.

        Args:
            size: of a number in the computation, bytes.
            adapter: whether the weights are frozen.
        """
        projected = size * (self.width + 2 * self.conv_width + self.n_heads)
        pairs = self.n_heads * self.chunk_size * (4 + 2 * size)
        into_state = self.n_heads * self.d_state * 12
        states = 2.5 * size * self.width * self.d_state / self.chunk_size
        scan = self.width * (4 + (3 * size if size < 4 else 8)) + self.n_heads * (24 + 2 * size)
        return projected + pairs + into_state + states + scan + self.kept_of_norm(size, adapter)

    def kept_of_norm(self, size: int, adapter: bool) -> int:
        """Return those of the gate and the norm behind the scan."""
        if not self.rms_norm:
            return 3 * size * self.width
        return self.width * (16 + (0 if adapter else 8 + size))

    def working(self, size: int) -> float:
        """Return the bytes per token that a layer takes for a while without gradient."""
        return size * (self.width + 2.0 * self.conv_width) + 12 * self.width + 12 * self.n_heads * self.chunk_size

    def gradients(self) -> float:
        """Return the bytes per token of the gradients that the backward pass of the scan holds at once."""
        return 4.0 * (4 * self.width + 2 * self.n_heads * (self.chunk_size + self.d_state))

    def operations(self) -> int:
        """Return the floating-point operations of a token in the scan of all layers."""
        pairs = self.chunk_size * (self.n_heads * self.d_state + self.width)
        return self.layers * 2 * (pairs + 2 * self.width * self.d_state)


NAMES = {
    "n_heads": ("mamba_n_heads", "mamba_num_heads"),
    "d_head": ("mamba_d_head", "mamba_head_dim"),
    "d_state": ("mamba_d_state", "ssm_state_size"),
    "n_groups": ("mamba_n_groups", "n_groups"),
    "d_conv": ("mamba_d_conv", "conv_kernel"),
    "chunk_size": ("mamba_chunk_size", "chunk_size"),
    "rms_norm": ("mamba_rms_norm",),
}
"""Names of the numbers in the families' configurations."""


def mamba2_of(text: Mapping[str, Any], layers: int) -> Mamba2 | None:
    """Return the Mamba 2 of a text configuration with so many such layers; None without."""
    known = {field: next((text[name] for name in names if name in text), None) for field, names in NAMES.items()}
    fields: dict[str, Any] = {field: value for field, value in known.items() if isinstance(value, int)}
    return Mamba2(layers, **fields) if layers and {"n_heads", "d_head", "d_state"} <= fields.keys() else None
