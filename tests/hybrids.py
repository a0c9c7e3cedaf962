"""Tiny sizes of policies with layers that keep a state, for `AutoConfig.for_model`, by their model types."""

from typing import Any

MIXED = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
KIMI = {"kda_layers": [1, 3], "full_attn_layers": [2], "num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4}

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA | MIXED,
    "qwen3_5_moe_text": DELTA | MIXED | EXPERTS,
    "qwen3_next": DELTA | MIXED | EXPERTS | {"initializer_range": 0.1},
    "olmo_hybrid": DELTA | MIXED,
    "kimi_linear": {
        **MIXED,
        **{"num_key_value_heads": 4, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 8},
        **{"first_k_dense_replace": 3, "linear_attn_config": KIMI},
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": EXPERTS | {"layer_types": ["conv", "full_attention", "conv"]},
    "granitemoehybrid": EXPERTS | MAMBA | {"shared_intermediate_size": 32, **MIXED},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 32, "mamba_d_head": 8, "mamba_expand": 1},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [1]},
    "nemotron_h": {
        **{"layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 4, "mamba_head_dim": 16},
        **{"ssm_state_size": 8, "n_groups": 1},
    },
    "zamba2": {
        **{"layers_block_type": ["mamba", "hybrid", "mamba"], "hybrid_layer_ids": [1], "mamba_d_state": 8},
        **{"n_mamba_heads": 4, "mamba_ngroups": 1},
    },
}
"""Policies that continue from the state of a prompt; they have three layers."""
NOT_CONTINUED: dict[str, dict[str, Any]] = {
    "jamba": {"mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1, **EXPERTS},
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
}
"""Policies whose scan begins without a state (Mamba 1 in transformers)."""
