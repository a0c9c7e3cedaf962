"""Families of models, by `model_type`, that differ from Llama in what their layers hold."""

GATED = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""Families whose attention has an output gate, and whose norms scale in float32."""
GEMMA4 = ("gemma4", "gemma4_text")
GEMMA3N = ("gemma3n", "gemma3n_text")
QK_NORM = (
    "qwen3",
    "qwen3_moe",
    "qwen3_vl",
    "qwen3_vl_text",
    "olmo2",
    "exaone4",
    "gemma3",
    "gemma3_text",
    *GEMMA3N,
    "lfm2",
    "lfm2_moe",
    *GEMMA4,
    *GATED,
)
"""Families with norms of queries and keys."""
SANDWICH = ("gemma2", "gemma3", "gemma3_text", "glm4", *GEMMA3N, *GEMMA4)
"""Families with a norm before and one after each half of a layer."""
PARALLEL = ("falcon_h1",)
"""Families whose layers have Mamba 2 beside attention."""
MAMBA = ("bamba", "granitemoehybrid", "nemotron_h", *PARALLEL)
"""Families of which some layers have Mamba 2 in the place of attention, or beside it."""
SCALED_IN_FLOAT32 = ("nemotron_h",)
"""Families whose norms scale in float32."""
UNGATED = (
    "apertus",
    "arcee",
    "jais2",
    "nanochat",
    "nemotron",
    "nemotron_h",
)
"""Families whose feed-forward layers have no gate."""
FUSED_GATE = ("phi3", "glm", "glm4", "granitemoehybrid")
"""Families with one matrix for gate and up projection."""
FUSED_QKV = ("phi3",)
"""Families with one matrix for queries, keys and values."""
EAGER = ("gpt_oss",)
"""Families whose attention has the probabilities of all pairs of tokens in memory, for its sinks."""
QKV_BIAS = (
    "qwen2",
    "qwen2_moe",
    "qwen2_vl",
    "qwen2_vl_text",
    "qwen2_5_vl",
    "qwen2_5_vl_text",
    "glm",
    "glm4",
    "gpt_oss",
)
"""Families with biases of queries, keys and values."""
TIED = ("gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "opt", *GEMMA3N, *GEMMA4)
"""Families that tie input and output embedding without a word of it in `config.json`."""
