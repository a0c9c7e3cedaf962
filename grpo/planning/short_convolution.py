"""Gated short convolutions (LFM2, 2511.23404): the numbers of a layer, and what autograd keeps of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class ShortConvolution:
    """The layers of a hybrid with a gated convolution over a few tokens; methods are those of `DeltaNet`."""

    layers: int
    """Number of such layers."""
    width: int
    """Width of the convolution, and of its two gates: that of the residual stream."""
    kernel: int
    """Tokens that the convolution sees."""
    chunk_size: ClassVar[int] = 1

    def linears(self, hidden: int) -> dict[str, tuple[int, int, int]]:
        """Return the linear modules: inputs, outputs and count of each name."""
        return {"in_proj": (hidden, 3 * self.width, self.layers), "out_proj": (self.width, hidden, self.layers)}

    def other_parameters(self) -> int:
        """Return the number of parameters of all layers that are in no linear module."""
        return self.layers * self.width * self.kernel

    def cache(self, size: int) -> int:
        """Return the bytes of the states of a sequence."""
        return self.layers * size * self.width * self.kernel

    def kept(self, size: int, adapter: bool) -> float:
        """Return the bytes per token that autograd keeps of a layer, but for the inputs of its first projection.

        They are both gates and the input, the product that is convolved, and the result before and behind its gate.
        """
        return size * 5 * self.width + self.kept_of_norm(size, adapter)

    def kept_of_norm(self, size: int, adapter: bool) -> int:
        """Return those of the result behind the gate, the input of the last projection."""
        return size * self.width

    def working(self, size: int) -> float:
        """Return the bytes per token that a layer takes for a while without gradient."""
        return size * 6.0 * self.width

    def gradients(self) -> float:
        """Return the bytes per token of the gradients that the backward pass of the convolution holds at once."""
        return 2.0 * 5 * self.width

    def operations(self) -> int:
        """Return the floating-point operations of a token in the convolutions of all layers."""
        return self.layers * 2 * self.width * (self.kernel + 1)


def short_convolution_of(text: Mapping[str, Any], layers: int) -> ShortConvolution | None:
    """Return the convolutions of a text configuration with so many such layers; None without."""
    return ShortConvolution(layers, text["hidden_size"], text.get("conv_L_cache", 3)) if layers else None


def adjusted_width(text: Mapping[str, Any], width: int) -> int:
    """Return the width of a feed-forward layer, of which LFM2 takes two thirds, rounded up to a multiple."""
    if not text.get("block_auto_adjust_ff_dim", text.get("model_type") == "lfm2"):
        return width
    multiple = text.get("block_multiple_of", 256)
    return -(-int(text.get("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3)) // multiple) * multiple
