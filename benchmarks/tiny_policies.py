"""Tiny sizes for the configuration of any architecture of transformers: two to four layers, 32 numbers wide.

Numbers are replaced by name, in the configuration and in those within it; lists with the kinds of layers keep every
kind. `OWN` has the numbers of families that need others.
"""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

LAYERS = 2
VOCABULARY = 87


def named(size: int, names: str) -> dict[str, int]:
    """Return a size for each of some names of numbers."""
    return dict.fromkeys(names.split(), size)


SIZES = {
    **named(VOCABULARY, "vocab_size vocab_size_per_layer_input audio_vocab_size"),
    **named(32, "hidden_size d_model n_embd embed_dim emb_dim embedding_size embedding_dim lru_width"),
    **named(32, "word_embed_proj_dim input_embedding_size output_embedding_size text_hidden_size out_hidden_size"),
    **named(32, "projection_dim vision_hidden_size attention_hidden_size encoder_hidden_size decoder_hidden_size"),
    **named(32, "output_dim merged_hidden_size hidden_size_global vision_output_dim projector_input_dim"),
    **named(32, "projector_output_dim patch_embed_hidden_size projector_hidden_size backbone_hidden_size"),
    **named(32, "dim_model_base moe_intermediate_size shared_expert_intermediate_size share_expert_dim"),
    **named(32, "moe_shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size"),
    **named(32, "alignment_intermediate_size image_text_hidden_size router_hidden_size"),
    **named(64, "intermediate_size ffn_dim d_ff d_inner n_inner ffn_hidden_size encoder_ffn_dim decoder_ffn_dim"),
    **named(64, "dim_ff intermediate_size_mlp feed_forward_size dense_intermediate_size mlp_dim dff mamba_d_ssm"),
    **named(64, "projection_intermediate_size"),
    **named(4, "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads"),
    **named(4, "decoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads linear_num_heads"),
    **named(4, "swa_num_attention_heads num_sliding_attention_heads linear_num_value_heads mamba_num_heads"),
    **named(4, "mamba_n_heads n_mamba_heads resampler_heads resampler_n_heads qk_rope_head_dim rotary_dim patch_size"),
    **named(4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    **named(2, "num_key_value_heads num_kv_heads kv_n_heads linear_num_key_heads swa_num_key_value_heads"),
    **named(2, "index_n_heads num_experts_per_tok num_experts_per_token moe_k moe_top_k moe_topk"),
    **named(8, "head_dim attention_head_dim attention_head_size linear_key_head_dim linear_value_head_dim"),
    **named(8, "linear_head_dim mamba_d_head swa_head_dim d_head d_kv dim_head v_head_dim qk_nope_head_dim"),
    **named(8, "index_head_dim kv_channels kv_lora_rank query_pre_attn_scalar resampler_head_dim resampler_dim_head"),
    **named(
        8,
        "mamba_d_state ssm_state_size state_size mamba_dt_rank time_step_rank global_head_dim sliding_window",
    ),
    **named(8, "attention_chunk_size"),
    **named(16, "mamba_head_dim mamba_headdim q_lora_rank o_lora_rank hidden_size_per_layer_input laurel_rank"),
    **named(16, "hc_lowrank ple_embed_dim pronunciation_embed_dim shape_embed_dim index_topk image_size"),
    **named(12, "qk_head_dim"),
    **named(1, "mamba_n_groups mamba_ngroups n_groups n_group topk_group n_shared_experts num_shared_experts"),
    **named(1, "moe_num_shared_experts num_expert_group first_k_dense_replace"),
    **named(LAYERS, "num_hidden_layers n_layer n_layers num_layers layers depth encoder_layers decoder_layers"),
    **named(LAYERS, "num_decoder_layers num_encoder_layers attention_layers resampler_depth conf_num_hidden_layers"),
    **named(512, "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length"),
    **named(50, "ngram_vocab_size_base encoder_hash_byte_group_vocab"),
}
"""Size by the name of a number."""
KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types", "indexer_types")
"""Names of lists with the kind of each layer."""
COMPUTED = ("head_dim", "num_key_value_heads")
"""Numbers that some families compute from others where they are None, and some do not."""
RANDOM = ("dropout", "pdrop", "jitter")
"""Parts of the names of numbers that make training random."""
TOKENS = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
ROTATION = {"rope_type": "default", "rope_theta": 1e4}
MROPE = {"text_config": {"rope_parameters": {**ROTATION, "mrope_section": [2, 1, 1]}}}
HALF = {"text_config": {"rope_parameters": {**ROTATION, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}}}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
QWEN4 = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8}
QWEN4 |= {"indexer_compress_ratio": 4, "split_ngram_parts": 1}
COMPASS = {"rope_parameters": {"full_attention": ROTATION}, "num_experts": 4, "num_experts_per_tok": 2}
PATCHES = {"video_temporal_patch_size": 2}
ERNIE = {"text_config": {"moe_num_experts": 4, "moe_intermediate_size": [32, 32]}}
SEEN = {"<image>": 70, "<|image token|>": 70, "<|extra_200|>": 71, "IMGIMGA": 72}
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_d_head": 16, "attn_layer_indices": [1]},
    "chameleon": {"vocabulary_map": SEEN},
    "cohere_compass": {"text_config": COMPASS},
    "cohere_compass_text": COMPASS,
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"], **ROUTED}},
    "deepseek_v2": ROUTED,
    "deepseek_v4": {"head_dim": 16, "partial_rotary_factor": 0.25},
    "dots1": ROUTED,
    "emu3": {"vocabulary_map": SEEN},
    "ernie4_5_vl_moe": ERNIE,
    "falcon_h1": {"mamba_d_ssm": 32},
    "gemma3n_text": {"num_kv_shared_layers": 2, "num_hidden_layers": 4}
    | {"layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 4}
    | {"intermediate_size": [64] * 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite4_vision": {"text_config": {"model_type": "granite"}},
    "granitemoehybrid": {"mamba_d_head": 16, "layers_block_type": ["linear_attention", "full_attention"]},
    "hunyuan_vl": MROPE,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"head_dim": 16},
    "nemotron_h_omni": {"vision_config": PATCHES},
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "reformer": {"axial_pos_embds": False},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "xlstm": {"hidden_size": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]}
    | {"num_hidden_layers": 4, "attention_hidden_size": 64, "attention_head_dim": 16},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba"], "hybrid_layer_ids": [1], "num_hidden_layers": 3}
    | {"attention_hidden_size": 64, "attention_head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
    "qwen2_5_omni_thinker": MROPE | {"vision_start_token_id": 71},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 71},
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "paddleocr_vl", "glm4v", "glm46v", "glm_ocr", "glmga"), MROPE),
    "glm4v_moe": HALF,
}
"""Numbers of families that need others, by model type."""


def tiny_config(family: str) -> PreTrainedConfig:
    """Return the configuration of a tiny policy of a model type."""
    own, sizes = OWN.get(family, {}), sizes_of(AutoConfig.for_model(family))
    if not own.keys().isdisjoint(KINDS):  # some names mean the same list
        sizes = {name: size for name, size in sizes.items() if name not in KINDS}
    return AutoConfig.for_model(family, **merged(sizes, own))


def merged(sizes: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Return sizes with others in their places, within configurations as well."""
    nested = {name: merged(sizes[name], value) for name, value in others.items() if name.endswith("_config")}
    return {**sizes, **others, **nested}


def sizes_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return arguments for a tiny configuration of the same class."""
    sizes: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            of_type = {"model_type": value.model_type} if value.model_type else {}
            sizes[name] = sizes_of(value) | of_type
        elif (size := size_of(name, value)) is not None:
            sizes[name] = size
    if "kv_lora_rank" in sizes:  # latent attention has a key for each query; `head_dim` is what is rotated
        heads = {"num_key_value_heads": sizes.get("num_attention_heads"), "head_dim": sizes.get("qk_rope_head_dim")}
        sizes |= {name: value for name, value in heads.items() if name in sizes}
    if "is_decoder" in vars(config):
        sizes["is_decoder"] = True
    if rotation := getattr(config, "rope_parameters", None):
        sizes["rope_parameters"] = rotation_of(rotation, sizes.get("head_dim") or 8)
    return sizes | layers_of(config, sizes)


def size_of(name: str, value: Any) -> Any:
    """Return the size of a number, or of each of a list; None to leave what it is."""
    if name == "initializer_range":
        return 0.2  # gradients are then neither tiny nor all alike
    if isinstance(value, float) and any(part in name for part in RANDOM):
        return 0.0  # two trainers would drop others
    if isinstance(value, int) and not isinstance(value, bool):
        if name.endswith(("_token_id", "_token_index")):
            return TOKENS.get(name, 60 + len(name) % 20)
        return SIZES.get(name) if value else None
    if name in COMPUTED and value is None:
        return SIZES[name]
    if name in SIZES and isinstance(value, list) and value and isinstance(value[0], int):
        return [SIZES[name]] * LAYERS
    return None


def rotation_of(parameters: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Return parameters of rotary embeddings whose sections fit into a head."""
    changed: dict[str, Any] = {
        name: rotation_of(of, head_dim) if isinstance(of, dict) else of for name, of in parameters.items()
    }
    if "mrope_section" in changed:
        half = int(head_dim * changed.get("partial_rotary_factor", 1.0)) // 2
        changed["mrope_section"] = [half - 2 * (half // 3), half // 3, half // 3]
    return changed


def layers_of(config: PreTrainedConfig, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return lists with the kinds of layers, in which every kind occurs, and the number of layers."""
    settable = [name for name in KINDS if not isinstance(getattr(type(config), name, None), property)]
    settable = [name for name in settable if config.attribute_map.get(name, name) in settable]
    kinds = {name: list(dict.fromkeys(getattr(config, name, None) or [])) for name in settable}
    longest = max([LAYERS, *map(len, kinds.values())])
    changed: dict[str, Any] = {
        name: [of[layer % len(of)] for layer in range(longest)] for name, of in kinds.items() if of
    }
    for name in ("num_hidden_layers", "num_layers"):
        if name in sizes and longest > LAYERS:
            changed[name] = longest
    return changed
