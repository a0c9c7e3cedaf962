"""Embeddings of each token for each layer (Gemma 3n and 4): their numbers, and what autograd keeps of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PerLayer:
    """A second embedding, of which each layer gets its part, gated by the layer's output."""

    layers: int
    vocabulary: int
    """Tokens that have such an embedding."""
    width: int
    """Numbers that a layer gets."""

    @property
    def embeddings(self) -> int:
        """Parameters of the embedding."""
        return self.vocabulary * self.layers * self.width

    def linears(self, hidden: int) -> dict[str, tuple[int, int, int]]:
        """Return the linear modules: inputs, outputs and count of each name."""
        return {
            "per_layer_input_gate": (hidden, self.width, self.layers),
            "per_layer_projection": (self.width, hidden, self.layers),
            "per_layer_model_projection": (hidden, self.layers * self.width, 1),
        }

    def other_parameters(self, hidden: int) -> int:
        """Return the number of parameters in no linear module: the embedding, a norm of each layer, and its own."""
        return self.embeddings + self.layers * hidden + self.width

    def kept(self, size: int, hidden: int, adapter: bool) -> float:
        """Return the bytes per token that autograd keeps of a layer beside its embedding and the inputs of adapters.

        They are the gate, its activation and the gated embedding, and of the norm the input in float32 and, if it is
        trained, what it scales.
        """
        return size * 3 * self.width + 4 * hidden + (0 if adapter else (size + 4) * hidden)

    def gradients(self, size: int) -> float:
        """Return the bytes per token of the gradients of all layers' parts: a sum, one more, and both added."""
        return 3.0 * size * self.layers * self.width

    def held(self, size: int, adapter: bool) -> float:
        """Return the bytes per token and layer of the embeddings, and of their norm as that of a layer."""
        return (size + (4 if adapter else 8)) * self.width


def per_layer_of(text: Mapping[str, Any], layers: int) -> PerLayer | None:
    """Return the embeddings of a text configuration with so many layers; None without."""
    width = text.get("hidden_size_per_layer_input")
    vocabulary = text.get("vocab_size_per_layer_input", text.get("vocab_size", 0))
    return PerLayer(layers, vocabulary, width) if width else None
