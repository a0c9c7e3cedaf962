"""The vision tower and the projector of a model: the numbers of an architecture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MERGES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Families whose projector is in the tower, and merges neighbouring patches into a token."""
GATED = ("qwen2_5_vl",)
"""Families whose tower has SwiGLU and RMS norms."""
GEMMA4 = ("gemma4",)
"""Families whose tower has SwiGLU and Gemma's norms without biases, and learned positions in both directions. Its
patches are averaged, and a matrix is the projector."""
QUICK_GELU = ("qwen2_vl", "llava", "llava_next")
"""Families whose tower keeps the sigmoid of its activation as well."""
SHUFFLES = ("smolvlm", "idefics3")
"""Families whose projector is a matrix over neighbouring patches. Their processors return a mask."""
HEADS = ("num_heads", "num_attention_heads", "attention_heads")
"""Names of the number of attention heads."""
TILES = {"smolvlm": 17, "idefics3": 17, "internvl": 13, "llava_next": 5}
"""Most tiles that an image is cut into, the whole image in small included, as published processors do."""


@dataclass(frozen=True)
class Vision:
    """A transformer over the patches of images; fields have the names of Hugging Face configurations."""

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
    """Number of patches in a row per token."""
    image_size: int = 0
    """Pixels in a row of each image or tile; 0 if images keep their size."""
    num_position_embeddings: int = 0
    """Number of learned positions; 0 with rotary positions only."""
    num_deepstack: int = 0
    """Further projectors, of features from within the tower (Qwen3-VL)."""

    @property
    def patch_numbers(self) -> int:
        """Numbers of a patch's pixels."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def linears(self) -> dict[str, tuple[int, int, int]]:
        """Return the linear modules of the tower: inputs, outputs and count of each name."""
        hidden, width, layers = self.hidden_size, self.intermediate_size, self.num_hidden_layers
        square = (hidden, hidden, layers)
        if self.model_type in MERGES:
            attention = {"qkv": (hidden, 3 * hidden, layers), "proj": square}
        else:
            attention = {"q_proj": square, "k_proj": square, "v_proj": square, "out_proj": square}
        if self.model_type in (*GATED, *GEMMA4):
            up = (hidden, width, layers)
            return attention | {"gate_proj": up, "up_proj": up, "down_proj": (width, hidden, layers)}
        first, second = ("linear_fc1", "linear_fc2") if self.model_type == "qwen3_vl" else ("fc1", "fc2")
        return attention | {first: (hidden, width, layers), second: (width, hidden, layers)}

    def projector_linears(self) -> dict[str, tuple[int, int, int]]:
        """Return the linear modules of the projector: inputs, outputs and count of each name."""
        wide, out = self.hidden_size * self.spatial_merge_size**2, self.out_hidden_size
        if self.model_type in SHUFFLES:
            return {"proj": (wide, out, 1)}
        if self.model_type == "gemma3":  # a parameter, of no linear module
            return {}
        if self.model_type in GEMMA4:
            return {"embedding_projection": (self.hidden_size, out, 1)}
        inner, count = (wide, 1 + self.num_deepstack) if self.model_type in MERGES else (out, 1)
        first, second = ("linear_fc1", "linear_fc2") if self.model_type == "qwen3_vl" else ("linear_1", "linear_2")
        if self.model_type in ("qwen2_vl", "qwen2_5_vl"):
            first, second = "0", "2"
        return {first: (wide, inner, count), second: (inner, out, count)}

    def tower_parameters(self) -> int:
        """Return the number of parameters of the tower."""
        hidden = self.hidden_size
        embedding = self.patch_numbers * hidden + self.num_position_embeddings * hidden
        if self.model_type in GEMMA4:
            matrices = sum(inputs * outputs * count for inputs, outputs, count in self.linears().values())
            norms = self.num_hidden_layers * (4 * hidden + 2 * hidden // self.num_attention_heads)
            return matrices + norms + embedding
        layers = sum((inputs + 1) * outputs * count for inputs, outputs, count in self.linears().values())
        layers += self.num_hidden_layers * (2 if self.model_type in GATED else 4) * hidden
        if self.model_type in ("qwen2_vl", "qwen2_5_vl"):
            return layers + embedding
        if self.model_type in ("llava", "llava_next"):  # CLIP: a class token, a norm before and one after the layers
            return layers + embedding + hidden + 4 * hidden
        return layers + embedding + hidden + (0 if self.model_type in MERGES else 2 * hidden)

    def projector_parameters(self) -> int:
        """Return the number of parameters of the projector."""
        if self.model_type == "gemma3":  # and a norm
            return self.hidden_size * (self.out_hidden_size + 1)
        biased = self.model_type not in (*SHUFFLES, *GEMMA4)
        count = sum((i + biased) * o * many for i, o, many in self.projector_linears().values())
        if self.model_type not in MERGES:
            return count
        wide = self.hidden_size * self.spatial_merge_size**2  # of the norms within the tower
        return count + self.hidden_size * (1 if self.model_type in GATED else 2) + self.num_deepstack * 2 * wide

    def parameters_of(self, *parts: str) -> int:
        """Return the number of parameters of `vision`, of `projector`, or of both."""
        counts = {"vision": self.tower_parameters(), "projector": self.projector_parameters()}
        return sum(counts[part] for part in set(parts))


def vision_of(config: Mapping[str, Any]) -> Vision | None:
    """Return the vision part in a Hugging Face `config.json` or a `shape:` of a preset.

    None without a vision part, or without the numbers of a transformer over patches: such a tower is not in the plan.
    """
    part = config.get("vision_config") or {}
    family = str(config.get("model_type", "")).removesuffix("_moe")
    if family == "qwen3_5":  # has the tower of a Qwen3-VL
        family = "qwen3_vl"

    def number(*names: str, default: int = 0) -> int:
        values = (part.get(name) for name in names)
        sides = (value[0] if isinstance(value, Sequence) and value else value for value in values)
        return next((int(value) for value in sides if isinstance(value, int)), default)

    hidden = number("embed_dim", "hidden_size") if family == "qwen2_vl" else number("hidden_size")
    patch, layers, heads = number("patch_size"), number("depth", "num_hidden_layers"), number(*HEADS)
    if not (hidden and patch and layers and heads):
        return None
    side = 0 if family in MERGES else number("image_size", default=0)
    positions = (side // patch) ** 2 + (family in ("llava", "llava_next"))
    merged = int(config.get("scale_factor", 2)) if family in SHUFFLES else 1
    if family == "internvl":
        merged = 2
    if family == "gemma3":  # patches are averaged to so many tokens
        merged = (side // patch) // int(int(config.get("mm_tokens_per_image", 256)) ** 0.5)
    if family in GEMMA4:
        positions = 2 * number("position_embedding_size", default=10240)
        merged = number("pooling_kernel_size", default=3)
    return Vision(
        model_type=family,
        hidden_size=hidden,
        intermediate_size=number("intermediate_size", default=hidden * number("mlp_ratio", default=4)),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        patch_size=patch,
        out_hidden_size=int((config.get("text_config") or config).get("hidden_size", hidden)),
        temporal_patch_size=number("temporal_patch_size", default=2 if family in MERGES else 1),
        spatial_merge_size=number("spatial_merge_size", default=2 if family in MERGES else merged),
        image_size=side,
        num_position_embeddings=number("num_position_embeddings", default=2304 if family == "qwen3_vl" else positions),
        num_deepstack=len(part.get("deepstack_visual_indexes") or []) if family == "qwen3_vl" else 0,
    )
