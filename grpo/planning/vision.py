"""The vision tower and the projector of a model: the numbers of an architecture that their memory follows from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MERGES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Families whose projector is in the tower, and makes one token of several patches beside each other."""
GATED = ("qwen2_5_vl",)
"""Families whose tower has SwiGLU and RMS norms."""


@dataclass(frozen=True)
class Vision:
    """A transformer over the patches of images. Names are those of Hugging Face configurations."""

    model_type: str
    """Family of the whole model, such as `qwen2_5_vl`."""
    hidden_size: int
    """Width of the tower."""
    intermediate_size: int
    """Width of its feed-forward layers."""
    num_hidden_layers: int
    num_attention_heads: int
    patch_size: int
    """Pixels in a row of a patch."""
    out_hidden_size: int
    """Width of the language model, to which the projector leads."""
    temporal_patch_size: int = 1
    """Frames of a patch; a picture is repeated."""
    spatial_merge_size: int = 1
    """Patches in a row that become one token."""
    image_size: int = 0
    """Pixels in a row of each image; 0 where images keep their size."""
    num_position_embeddings: int = 0
    """Learned positions; 0 with rotary ones alone."""
    num_deepstack: int = 0
    """Further projectors, of features from within the tower (Qwen3-VL)."""

    @property
    def patch_numbers(self) -> int:
        """Numbers of a patch's pixels."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def tower_parameters(self) -> int:
        """Return the number of parameters of the tower."""
        hidden, width = self.hidden_size, self.intermediate_size
        attention = 4 * (hidden * hidden + hidden)
        if self.model_type in GATED:
            layer = attention + 3 * hidden * width + 2 * width + hidden + 2 * hidden
        else:
            layer = attention + 2 * hidden * width + width + hidden + 4 * hidden
        biased = self.model_type not in ("qwen2_vl", "qwen2_5_vl")
        embedding = self.patch_numbers * hidden + (hidden if biased else 0) + self.num_position_embeddings * hidden
        return self.num_hidden_layers * layer + embedding

    def projector_parameters(self) -> int:
        """Return the number of parameters of the projector: two linear modules behind a norm, in Qwen's models."""
        wide, out = self.hidden_size * self.spatial_merge_size**2, self.out_hidden_size
        mlp = wide * wide + wide + wide * out + out
        norm = self.hidden_size * (1 if self.model_type in GATED else 2)
        return mlp + norm + self.num_deepstack * (mlp + 2 * wide)


def vision_of(config: Mapping[str, Any]) -> Vision | None:
    """Return the vision part that a Hugging Face `config.json`, or a `shape:` of ours, describes; None without one.

    Raises:
        ValueError: a number is missing.
    """
    part = config.get("vision_config")
    if not part:
        return None

    def number(*names: str, default: int | None = None) -> int:
        for name in names:
            if isinstance(part.get(name), int):
                return int(part[name])
        if default is None:
            raise ValueError(f"vision_config.{names[0]} is missing")
        return default

    family = str(config.get("model_type", ""))
    hidden = number("embed_dim", "hidden_size") if family == "qwen2_vl" else number("hidden_size")
    text = config.get("text_config") or config
    return Vision(
        model_type=family,
        hidden_size=hidden,
        intermediate_size=number("intermediate_size", default=hidden * number("mlp_ratio", default=4)),
        num_hidden_layers=number("depth", "num_hidden_layers"),
        num_attention_heads=number("num_heads", "num_attention_heads"),
        patch_size=number("patch_size"),
        out_hidden_size=int(text["hidden_size"]),
        temporal_patch_size=number("temporal_patch_size", default=2 if family in MERGES else 1),
        spatial_merge_size=number("spatial_merge_size", default=2 if family in MERGES else 1),
        image_size=0 if family in MERGES else number("image_size", default=0),
        num_position_embeddings=number("num_position_embeddings", default=2304 if family == "qwen3_vl" else 0),
        num_deepstack=len(part.get("deepstack_visual_indexes") or []) if family == "qwen3_vl" else 0,
    )
