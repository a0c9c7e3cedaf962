"""Latent attention (MLA, 2405.04434, section 2.1): its numbers, and what transformers keeps of a layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Latent:
    """Attention whose keys and values are products of a latent, beside a rotated key for all heads.

    Fields have the names of Hugging Face configurations.
    """

    num_attention_heads: int
    kv_lora_rank: int
    """Width of the latent of keys and values."""
    qk_nope_head_dim: int
    """Width of the part of a head's queries and keys that is not rotated."""
    qk_rope_head_dim: int
    """Width of the rotated part."""
    v_head_dim: int
    q_lora_rank: int = 0
    """Width of the latent of queries; 0 without."""

    @property
    def query_width(self) -> int:
        """Width of a token's queries, and of its keys, all heads."""
        return self.num_attention_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)

    @property
    def value_width(self) -> int:
        """Width of a token's values, and of attention's output, all heads."""
        return self.num_attention_heads * self.v_head_dim

    @property
    def cached(self) -> int:
        """Numbers of a token in the cache of a layer: the latent, and the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def expanded(self) -> int:
        """Width of a token's values and of its keys without their rotated parts, the product of its latent."""
        return self.num_attention_heads * (self.qk_nope_head_dim + self.v_head_dim)

    @property
    def read(self) -> int:
        """Numbers that a layer computes of a token in the cache: the latent's product, and keys with rotated parts."""
        return self.expanded + self.query_width

    def linears(self, hidden: int, layers: int) -> dict[str, tuple[int, int, int]]:
        """Return the linear modules: inputs, outputs and count of each name."""
        queries = {"q_proj": (hidden, self.query_width, layers)}
        if self.q_lora_rank:
            queries = {"q_a_proj": (hidden, self.q_lora_rank, layers)}
            queries["q_b_proj"] = (self.q_lora_rank, self.query_width, layers)
        return {
            **queries,
            "kv_a_proj_with_mqa": (hidden, self.cached, layers),
            "kv_b_proj": (self.kv_lora_rank, self.expanded, layers),
            "o_proj": (self.value_width, hidden, layers),
        }

    def other_parameters(self) -> int:
        """Return the number of parameters of a layer's norms of latents."""
        return self.q_lora_rank + self.kv_lora_rank

    def kept(self, size: int, adapter: bool) -> float:
        """Return the bytes per token that autograd keeps of a layer.

        They are queries, keys with their rotated parts, the latent's product, the output, twice, and latents. The
        norms of the latents keep their input in float32, and what they scale if they are trained.
        """
        latents = (4 if adapter else 4 + 2 * size) * (self.q_lora_rank + self.kv_lora_rank)
        return size * (2 * self.query_width + self.expanded + 2 * self.value_width) + latents


def latent_of(text: Mapping[str, Any]) -> Latent | None:
    """Return the latent attention of a text configuration; None without."""
    names = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if not all(isinstance(text.get(name), int) for name in names):
        return None
    return Latent(**{name: text[name] for name in names}, q_lora_rank=text.get("q_lora_rank") or 0)
