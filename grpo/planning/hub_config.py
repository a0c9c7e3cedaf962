"""The shape of a model from its Hugging Face configuration, whatever the names of its family are."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from grpo.planning.altup import altup_of
from grpo.planning.delta_net import delta_net_of
from grpo.planning.families import GATED, GEMMA4, MAMBA, PARALLEL, TIED
from grpo.planning.latent import latent_of
from grpo.planning.mamba2 import mamba2_of
from grpo.planning.per_layer import per_layer_of
from grpo.planning.shape import Recurrent, Shape
from grpo.planning.short_convolution import adjusted_width, short_convolution_of
from grpo.planning.vision import vision_of

AUDIO, AUDIO_WIDTH = 304_824_608, 1536
"""Parameters of the audio tower of a Gemma 4, and its width, which a matrix leads to that of the language model."""
FEED_FORWARD = ("mlp", "moe", "-", "E")
"""Feed-forward layers of families that count them by themselves (Nemotron-H); here each other layer has a part."""
STATES = ("mamba", "linear_attention", "M")
"""Layers with Mamba 2 in families that have it."""
OTHER_NAMES = {
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "first_k_dense_replace": ("num_dense_layers",),
    "num_experts_per_tok": ("num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"),
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "intermediate_size": ("n_inner", "ffn_dim"),
}
"""Names of the same numbers in other families' configurations."""
RECURRENT = {"state_size", "attention_hidden_size"}
"""Numbers of families without attention heads (Mamba, RWKV), whose layers are planned as attention by a head."""
KINDS = ("layer_types", "layers_block_type", "hybrid_override_pattern")
"""Names of the list of kinds of layers."""
EVERY = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6}
"""One layer in so many has no window, in families that do not say so."""


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Return the shape that a `config.json` or a `shape:` of ours describes; ValueError if a number is missing."""
    text = {**config, **(config.get("text_config") or config.get("llm_config") or {})}
    number = partial(number_of, text)
    kinds: list[str] = next((text[name] for name in KINDS if text.get(name)), [])
    blocks = [kind for kind in kinds if kind not in FEED_FORWARD]
    hidden = number("hidden_size")
    heads = number("num_attention_heads", 1 if RECURRENT & text.keys() else None)
    layers = len(blocks) if len(blocks) < len(kinds) else number("num_hidden_layers", len(kinds) or None)
    experts = number("num_experts", 0)
    shared = number("num_kv_shared_layers", 0)
    width: float = adjusted_width(text, number("intermediate_size", 4 * hidden))
    width *= feed_forward_layers(kinds, layers, shared if text.get("use_double_wide_mlp") else 0) / layers
    window = number("sliding_window", 0) if text.get("use_sliding_window", True) else 0
    kinds = kinds or kinds_of_layers(text, layers)
    every = text.get("sliding_window_pattern") or EVERY.get(text.get("model_type", ""), 0)
    sliding = layers - layers // every if every else layers  # one layer in `every` attends to everything
    family = str(text.get("model_type", "llama"))
    of_layers = (text.get("per_layer_config") or {}).values()  # without a window, all of one size
    wider: Mapping[str, int] = next(iter(of_layers), {})
    dense = number("first_k_dense_replace", 0) or len(text.get("mlp_only_layers") or [])
    dense = dense or [*(text.get("mlp_layer_types") or [])].count("dense")
    expert = number("moe_intermediate_size", int(width) if experts else 0)
    return Shape(
        model_type=family,
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", hidden // heads),
        global_head_dim=number("global_head_dim", wider.get("head_dim", 512 if family in GEMMA4 else 0)),
        num_global_key_value_heads=number("num_global_key_value_heads", wider.get("num_key_value_heads", 0)),
        vocab_size=number("vocab_size"),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", family in TIED))),
        num_experts=experts,
        num_experts_per_tok=number("num_experts_per_tok", 1 if experts else 0),
        moe_intermediate_size=expert,
        shared_expert_intermediate_size=number(
            "shared_expert_intermediate_size", number("n_shared_experts", 0) * expert
        ),
        num_dense_layers=dense,
        num_kv_shared_layers=shared,
        attention_k_eq_v=bool(text.get("attention_k_eq_v")),
        latent=latent_of(text),
        per_layer=per_layer_of(text, layers),
        altup=altup_of(text, layers),
        recurrent=recurrent_of(text, kinds),
        sliding_window=window,
        num_sliding_layers=sum(kind == "sliding_attention" for kind in kinds) if kinds else sliding * bool(window),
        max_position_embeddings=number("max_position_embeddings", 0),
        given_parameters=number("parameters", 0),
        vision=vision_of(config),
        audio_parameters=AUDIO + AUDIO_WIDTH * hidden if config.get("audio_config") and family in GEMMA4 else 0,
        takes_images=any("vision" in key or "image" in key for key in config),
    )


def number_of(text: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a number of a text configuration, under any of its names; ValueError if it is missing or no number."""
    for known in (name, *OTHER_NAMES.get(name, ())):
        value = text.get(known)
        if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
            value = max(value)  # of all layers (Gemma 3n)
        if value is not None:
            if not isinstance(value, int) or value < (0 if default is not None else 1):
                raise ValueError(f"{known}={value}: a positive number is needed")
            return value
    if default is None:
        raise ValueError(f"{name} is missing")
    return default


def kinds_of_layers(text: Mapping[str, Any], layers: int) -> list[str]:
    """Return the kinds of layers of a configuration that does not list them; none where all are alike."""
    if every := text.get("full_attention_interval"):
        return ["full_attention" if (place + 1) % every == 0 else "linear_attention" for place in range(layers)]
    if attention := text.get("full_attn_idxs"):
        return ["full_attention" if place in attention else "conv" for place in range(layers)]
    return []


def feed_forward_layers(kinds: Sequence[str], layers: int, double: int) -> int:
    """Return the number of feed-forward layers beside so many others; those with double the width count twice.

    Nemotron-H counts them among its layers; in Gemma 4 layers without keys of their own may have double the width.
    """
    if alone := sum(kind in FEED_FORWARD for kind in kinds):
        return alone
    return layers + double


def recurrent_of(text: Mapping[str, Any], kinds: Sequence[str]) -> Recurrent | None:
    """Return the layers that keep a state, of a text configuration and the kinds of its layers; None without."""
    if text.get("model_type") in GATED:
        return delta_net_of(text, sum(kind == "linear_attention" for kind in kinds))
    if text.get("model_type") in MAMBA:
        layers = text["num_hidden_layers"] if text["model_type"] in PARALLEL else sum(kind in STATES for kind in kinds)
        return mamba2_of(text, layers)
    return short_convolution_of(text, sum(kind == "conv" for kind in kinds))
