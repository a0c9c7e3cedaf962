"""AltUp (2301.13310) and LAuReL (2411.07501) of Gemma 3n: several residual streams, and a way beside attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AltUp:
    """Streams of which a layer computes one, and predicts and corrects the others."""

    layers: int
    streams: int
    rank: int
    """Width of the way beside attention."""

    def linears(self, hidden: int) -> dict[str, tuple[int, int, int]]:
        """Return the linear modules: inputs, outputs and count of each name."""
        return {
            "modality_router": (hidden, self.streams, self.layers),
            "prediction_coefs": (self.streams, self.streams**2, self.layers),
            "correction_coefs": (self.streams, self.streams, self.layers),
            "linear_left": (hidden, self.rank, self.layers),
            "linear_right": (self.rank, hidden, self.layers),
            "altup_projections": (hidden, hidden, self.streams - 1),
            "altup_unembed_projections": (hidden, hidden, self.streams - 1),
        }

    def other_parameters(self, hidden: int) -> int:
        """Return the number of parameters in no linear module: two norms and a scale of each layer."""
        return 3 * self.layers * hidden

    def kept(self, size: int, hidden: int, adapter: bool) -> float:
        """Return the bytes per token that autograd keeps of a layer: all streams before and after it, and three norms.

        Trained norms keep what they scale, too.
        """
        return hidden * (size * (2 * self.streams + 4) + 12 + (0 if adapter else 3 * (size + 4)))

    def outside(self, size: int, hidden: int) -> float:
        """Return the bytes per token that it keeps of the making of the streams, and of their mean after all layers."""
        return 6.0 * size * hidden * (self.streams - 1)

    def gradients(self, size: int, hidden: int) -> float:
        """Return the bytes per token of the gradients of the streams in the backward pass of a layer."""
        return 1.5 * size * hidden * self.streams


def altup_of(text: Mapping[str, Any], layers: int) -> AltUp | None:
    """Return the streams of a text configuration with so many layers; None of another family than Gemma 3n."""
    streams, rank = text.get("altup_num_inputs"), text.get("laurel_rank")
    return AltUp(layers, streams, rank) if streams and rank else None
