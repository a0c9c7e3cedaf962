"""The facts of a GPU, and what those of AMD (ROCm) and Apple (MPS) cannot do: one line before anything is loaded."""

from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo.config.batch import processes
from grpo.config.facts import generator_of, is_quantized
from grpo.config.messages import of_resolver
from grpo.utils.errors import ConfigError
from grpo.utils.hardware import build_of_pytorch
from grpo.utils.local_gpu import local_vendor

OF_BITSANDBYTES = ("8bit", "bnb", "paged", "lion", "ademamix")
"""Parts of the names of optimizers that bitsandbytes has."""
VENDORS = ("nvidia", "amd", "apple")
WITHOUT_VLLM = "use generation=transformers"


def check_facts(config: DictConfig) -> None:
    """Check that the facts of the GPU are known: of `+gpu=auto`, of the GPU that is here.

    Raises:
        ConfigError: they are not, or make no sense.
    """
    if config.gpu is None:
        return
    try:
        OmegaConf.to_container(config.gpu, resolve=True)
    except OmegaConfBaseException as error:
        if ours := of_resolver(error):
            raise ours from error
        raise
    if config.gpu.vendor not in VENDORS:
        raise ConfigError(f"gpu.vendor={config.gpu.vendor}: possible: {', '.join(VENDORS)}")


def vendor_of(config: DictConfig) -> str:
    """Return the maker of the GPU that a run is for: `nvidia`, `amd` or `apple`; `cpu` without one."""
    if config.train.use_cpu:
        return "cpu"
    return str(config.gpu.vendor) if config.gpu is not None else local_vendor()


def check_device(config: DictConfig) -> None:
    """Check that the GPU and its libraries can do what is configured.

    Raises:
        ConfigError: the first thing that they cannot.
    """
    vendor = vendor_of(config)
    if vendor == "apple":
        check_apple(config)
    if vendor == "amd":
        check_amd(config)
    if config.train.use_vllm and (reason := why_no_vllm(config)):
        raise ConfigError(f"train.use_vllm=true: {reason}; {WITHOUT_VLLM}")


def check_apple(config: DictConfig) -> None:
    """Check what PyTorch's MPS, and the libraries on it, cannot do."""
    train, attention = config.train, str(config.model.attn_implementation or "")
    for key, value, reason in (
        ("launch.processes", processes(config) > 1 and processes(config), "a Mac has one GPU, and no NCCL"),
        (
            "train.optim",
            of_bitsandbytes(train) and train.optim,
            "bitsandbytes has none for MPS; use adamw_torch",
        ),
        ("model.attn_implementation", "flash" in attention and attention, "needs CUDA or ROCm; use sdpa or eager"),
        *(
            (f"update.{part}_on_host", config["update"][f"{part}_on_host"], "CPU and GPU of a Mac share their memory")
            for part in ("gradients", "activations")
        ),
        (
            "train.use_transformers_continuous_batching",
            train.use_transformers_continuous_batching,
            "its kernels and streams need CUDA or ROCm",
        ),
    ):
        if value:
            raise ConfigError(f"{key}={str(value).lower()}: {reason}")


def check_amd(config: DictConfig) -> None:
    """Check what ROCm, and the libraries on it, cannot do."""
    train, attention = config.train, str(config.model.attn_implementation or "")
    if attention.startswith("flash_attention_") and attention != "flash_attention_2":
        raise ConfigError(f"model.attn_implementation={attention}: for GPUs of NVIDIA alone; use sdpa")
    if "flash_attention_2" in attention and local_vendor() == "amd" and find_spec("flash_attn") is None:
        raise ConfigError(f"model.attn_implementation={attention}: flash-attn for ROCm is not installed; use sdpa")
    if "paged" in str(train.optim) and not is_cdna(config):
        raise ConfigError(
            f"train.optim={train.optim}: only CDNA moves pages of managed memory (XNACK); use adamw_8bit, or peft=lora"
        )
    quantized = is_quantized(config.peft)
    if (quantized or of_bitsandbytes(train)) and (lacking := no_bitsandbytes()):
        key = "peft.quantization" if quantized else f"train.optim={train.optim}"
        raise ConfigError(f"{key}: {lacking}; use peft=lora train.optim=adamw_torch")
    if generator_of(train) == "colocated" and train.vllm_enable_sleep_mode and not is_cdna(config):
        raise ConfigError(
            "train.vllm_enable_sleep_mode=true: of AMD's GPUs vLLM can put only CDNA (MI300) to sleep; leave it out"
        )


def why_no_vllm(config: DictConfig) -> str | None:
    """Return why vLLM cannot generate on the GPU of a run; None if it can."""
    vendor = vendor_of(config)
    if vendor == "apple":
        return "vLLM has no wheel for PyTorch on a Mac"
    if vendor == "amd" and is_quantized(config.peft):
        return "vLLM on ROCm does not take weights of bitsandbytes (peft.quantization)"
    return None


def may_sleep(config: DictConfig) -> bool:
    """Whether vLLM can free its memory on the GPU of a run: of AMD's, vLLM's `is_sleep_mode_available` says, MI300."""
    return vendor_of(config) != "amd" or is_cdna(config)


def is_cdna(config: DictConfig) -> bool:
    """Whether a run is for an AMD Instinct, as far as its profile says."""
    return config.gpu is not None and str(config.gpu.architecture).startswith("CDNA")


def of_bitsandbytes(train: DictConfig) -> bool:
    """Whether bitsandbytes steps the weights."""
    return any(part in str(train.optim) for part in OF_BITSANDBYTES)


def no_bitsandbytes() -> str | None:
    """Return why bitsandbytes cannot work with this machine's ROCm; None if it can, or if this is another machine."""
    version, spec = str(build_of_pytorch().get("hip") or ""), find_spec("bitsandbytes")
    if not version or spec is None:
        return None
    major = version.partition(".")[0]
    names = sorted(file.stem for file in Path(str(spec.origin)).parent.glob("libbitsandbytes_rocm*"))
    if any(name.startswith(f"libbitsandbytes_rocm{major}") for name in names):
        return None
    has = ", ".join(name.removeprefix("libbitsandbytes_rocm") for name in names) or "none"
    return f"the installed bitsandbytes has no library for ROCm {version} (it has: {has})"
