"""Decides whether a vLLM engine gets a LoRA adapter or all weights, and shares frozen weights, each with its reason."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from grpo.config.facts import is_quantized
from grpo.options import VLLM
from grpo.utils.hardware import visible_gpus

if TYPE_CHECKING:
    from omegaconf import DictConfig

LOOPBACK = ("127.0.0.1", "localhost", "::1")
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks that an engine of vLLM can be set to."""
CHANGING = (
    "use_dora",
    "modules_to_save",
    "trainable_token_indices",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "target_parameters",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "velora_config",
    "monteclora_config",
    "arrow_config",
    "kasa_config",
    "megatron_config",
)
"""Options of `peft.LoraConfig` that change the policy in ways that vLLM's LoRA refuses or overlooks."""
UNCHANGED_BASE = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the weights below the adapter as they are on disk."""
ENDS = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "embedding", "embeddings")
"""Names of embeddings and heads."""

STACKED = {
    *("afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe", "exaone_moe"),
    *("flex_olmo", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "hunyuan_v1_moe", "longcat_flash"),
    *("mellum", "minimax", "minimax_m2", "mixtral", "olmoe", "qwen3_moe", "qwen3_next", "qwen3_omni_moe"),
    *("qwen3_omni_moe_thinker", "solar_open"),
}
"""Families of whose experts PEFT adapts the stacked matrices where `target_modules` names the matrices of experts."""
OF_EXPERTS = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
QUANTIZES = "vllm_bnb_plugin"
"""The package with which vLLM quantizes as bitsandbytes does."""
HALF_ADAPTERS = "vLLM's kernels for adapters take 16 bits on a GPU, and this run computes in float32"
SAME_LAYOUT = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "granite")
"""Families whose weights in transformers are rows of vLLM's weights; a test compares them bit for bit."""


@dataclass(frozen=True)
class Transport:
    """The transfer from a policy to a vLLM engine before each generation."""

    adapter: bool
    """Whether vLLM gets the LoRA adapter alone; otherwise it gets all weights, with an adapter merged in."""
    merged_because: str | None
    """The reason to merge an adapter; None if it is not merged, or if there is none."""
    unshared_because: str | None
    """Why policy and engine cannot share the frozen weights; None if they can."""
    dtype: str
    """Data type in which policy and engine compute."""


def transport_of(config: "DictConfig", family: str | None = None) -> Transport:
    """Return the transfer of a configuration, if vLLM generates; no other code decides it.

    Args:
        family: `model_type` of the policy; None if unknown.
    """
    if config.engine.backend != VLLM:
        reason = f"engine.backend={config.engine.backend} takes all weights, into its own"
        return Transport(False, reason if config.peft is not None else None, reason, computed_in(config))
    merged = (why_merged(config) or why_not_experts(config.peft, family)) if config.peft is not None else None
    adapter = config.peft is not None and merged is None
    return Transport(adapter, merged, why_not_shared(config, merged, family), computed_in(config))


def why_merged(config: "DictConfig") -> str | None:
    """Return why vLLM gets the weights of a policy with LoRA merged; None if it gets the adapter."""
    train = config.train
    if reason := why_not(config.peft):
        return reason
    if is_quantized(config.peft) and computed_in(config) not in ("bfloat16", "float16"):
        half = "in half precision (train.bf16=true model.dtype=bfloat16)"
        return f"vLLM quantizes only where it computes {half}, and this run computes in {computed_in(config)}"
    if train.vllm_mode == "server" and not on_this_machine(train):
        return "the server is on another machine, and vLLM reads adapters from a file"
    if train.vllm_mode == "colocate" and train.vllm_enable_sleep_mode:
        return "a sleeping engine (train.vllm_enable_sleep_mode) discards adapters"
    on_gpu = not train.use_cpu and bool(config.gpu or visible_gpus())
    if on_gpu and train.vllm_mode == "colocate" and computed_in(config) == "float32":
        return HALF_ADAPTERS
    return None if config.engine.lora == "adapter" else f"engine.lora={config.engine.lora}"


def why_not_experts(options: Mapping[Any, Any], family: str | None) -> str | None:
    """Return why vLLM's LoRA cannot take the adapters that PEFT makes of a family's stacked experts; None without."""
    modules = options.get("target_modules") or ()
    named = modules == "all-linear" or (not isinstance(modules, str) and OF_EXPERTS & {*modules})
    return "vLLM's LoRA cannot take adapters of stacked experts" if family in STACKED and named else None


def why_not_shared(config: "DictConfig", merged: str | None, family: str | None) -> str | None:
    """Return why policy and engine cannot share the frozen weights; None if they can.

    Args:
        merged: why an adapter is merged; None if it is not.
        family: `model_type` of the policy.
    """
    train = config.train
    if train.vllm_mode == "server":
        return "a server has weights of its own"
    if config.peft is None:
        return "all weights are trained"
    if merged:
        return f"vLLM gets merged weights, {merged}"
    quantized = [part for part in ("peft", "engine") if config[part].get("quantization")]
    if quantized:
        return f"vLLM packs quantized weights ({quantized[0]}.quantization) in its own way"
    if train.vllm_tensor_parallel_size > 1:
        return "train.vllm_tensor_parallel_size divides vLLM's weights"
    if train.model_init_kwargs:
        return "train.model_init_kwargs is for weights that transformers loads"
    if train.fsdp or train.deepspeed:
        return "shard divides the policy's weights, or converts them"
    if config.model.dtype != computed_in(config):
        return f"vLLM computes in {computed_in(config)}, and model.dtype={config.model.dtype}"
    if family not in SAME_LAYOUT:
        return f"vLLM's layers have not been compared with those of {family}"
    return None


def why_not(options: Mapping[Any, Any]) -> str | None:
    """Return which option of `peft.LoraConfig` vLLM's LoRA cannot take; None if it takes such an adapter."""
    for name in CHANGING:
        if options.get(name):
            return f"vLLM's LoRA cannot take peft.{name}"
    if options.get("bias", "none") != "none":
        return f"vLLM's LoRA cannot take peft.bias={options['bias']}"
    if options.get("init_lora_weights", True) not in UNCHANGED_BASE:
        return f"peft.init_lora_weights={options['init_lora_weights']} changes the weights below the adapter"
    if (quantization := options.get("quantization")) and not quantizes_alike(quantization):
        return "vLLM quantizes to nf4 in 4 bits with double quantization, and peft.quantization otherwise"
    if options.get("r", 8) > RANKS[-1]:
        return f"vLLM's LoRA takes ranks up to {RANKS[-1]}, and peft.r={options['r']}"
    if options.get("vision"):
        return "vLLM's LoRA cannot take peft.vision=true"
    modules = options.get("target_modules") or ()
    ends = [] if isinstance(modules, str) else of_ends(modules)
    return f"vLLM's LoRA cannot take {', '.join(ends)} in peft.target_modules" if ends else None


def quantizes_alike(quantization: Mapping[Any, Any]) -> bool:
    """Whether vLLM quantizes the weights below an adapter as options of `BitsAndBytesConfig` do."""
    four_bits = bool(quantization.get("load_in_4bit")) and not quantization.get("load_in_8bit")
    nf4 = quantization.get("bnb_4bit_quant_type", "fp4") == "nf4"
    return four_bits and nf4 and bool(quantization.get("bnb_4bit_use_double_quant"))


def of_ends(modules: Iterable[str]) -> list[str]:
    """Return the embeddings and heads among some modules."""
    return sorted(name for name in modules if name.rpartition(".")[2] in ENDS)


def computed_in(config: "DictConfig") -> str:
    """Return the data type in which policy and engine compute."""
    train = config.train
    return "float16" if train.fp16 else "bfloat16" if train.bf16 in (None, True) else str(config.model.dtype)


def on_this_machine(train: "DictConfig") -> bool:
    """Whether the server listens on this machine alone."""
    url = train.vllm_server_base_url
    return (urlsplit(url).hostname if url else train.vllm_server_host) in LOOPBACK


def engine_rank(rank: int) -> int:
    """Return the smallest rank that an engine can be set to and that holds adapters of a rank."""
    return next(size for size in RANKS if size >= rank)
