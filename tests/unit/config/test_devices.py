"""What GPUs of AMD and Apple cannot do is refused in one line, in a plan too, and is never advised."""

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from omegaconf import DictConfig

from grpo.config import devices
from grpo.config.check import check
from grpo.extras.plan_tables.table import plan_cells
from grpo.planning import fit, machine
from grpo.planning.advice import advise
from grpo.planning.fit import make_plan
from grpo.utils.errors import ConfigError
from grpo.utils.limits import GB

Compose = Callable[..., DictConfig]
VLLM = "generation=vllm_colocate"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_gpu_memory", lambda processes: None)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (("+gpu=apple", VLLM), "train.use_vllm=true: vLLM has no wheel for PyTorch on a Mac; use generation=tran"),
        (
            ("+gpu=apple", "train.optim=adamw_8bit"),
            "train.optim=adamw_8bit: bitsandbytes has none for MPS; use adamw_t",
        ),
        (("+gpu=apple", "train.optim=paged_adamw"), "train.optim=paged_adamw: bitsandbytes has none for MPS"),
        (("+gpu=apple", "launch.processes=2"), "launch.processes=2: a Mac has one GPU, and no NCCL"),
        (
            ("+gpu=apple", "model.attn_implementation=flash_attention_2"),
            "model.attn_implementation=flash_attention_2: needs CUDA or ROCm; use sdpa or eager",
        ),
        (
            ("+gpu=apple", "update.activations_on_host=true"),
            "update.activations_on_host=true: CPU and GPU of a Mac share their memory",
        ),
        (
            ("+gpu=apple", "peft=none", "update.gradients_on_host=true"),
            "update.gradients_on_host=true: CPU and GPU of a Mac share their memory",
        ),
        (
            ("+gpu=apple", "train.use_transformers_continuous_batching=true"),
            "train.use_transformers_continuous_batching=true: its kernels and streams need CUDA or ROCm",
        ),
        (
            ("+gpu=mi300x", "peft=qlora", VLLM),
            "train.use_vllm=true: vLLM on ROCm does not take weights of bitsandbytes",
        ),
        (
            ("+gpu=mi300x", "model.attn_implementation=flash_attention_3"),
            "model.attn_implementation=flash_attention_3: for GPUs of NVIDIA alone; use sdpa",
        ),
        (("+gpu=rx7900xtx", "train.optim=paged_adamw_8bit"), "train.optim=paged_adamw_8bit: only CDNA moves pages"),
        (
            ("+gpu=rx7900xtx", VLLM, "train.vllm_enable_sleep_mode=true"),
            "train.vllm_enable_sleep_mode=true: of AMD's GPUs vLLM can put only CDNA (MI300) to sleep",
        ),
    ],
)
def test_what_a_gpu_cannot_do_is_one_line(composed: Compose, line: tuple[str, ...], problem: str) -> None:
    for checks in (check, make_plan):
        with pytest.raises(ConfigError) as raised:
            checks(composed(*line))
        assert str(raised.value).startswith(problem)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "line",
    [
        ("+gpu=apple",),
        ("+gpu=apple", "peft=none", "model=qwen2_5_0_5b", "train.optim=adamw_torch_fused"),
        ("+gpu=apple", "peft=qlora"),
        ("+gpu=apple", "train.use_cpu=true", "train.optim=adamw_8bit"),
        ("+gpu=mi300x", "train.optim=paged_adamw_8bit"),
        ("+gpu=mi300x", VLLM, "train.vllm_enable_sleep_mode=true"),
        ("+gpu=rx7900xtx", "peft=qlora"),
    ],
)
def test_what_a_gpu_can_do_is_planned(composed: Compose, line: tuple[str, ...]) -> None:
    config = composed(*line)
    check(config)
    assert make_plan(config).problem is None


def test_a_plan_lets_only_cdna_sleep(composed: Compose) -> None:
    line = ("gpu.memory_gb=16", "model=qwen2_5_3b", VLLM, "engine.share_weights=false")
    radeon, instinct = (
        make_plan(composed(f"+gpu={gpu}", *line, "train.gradient_accumulation_steps=8", "train.num_generations=8"))
        for gpu in ("rx7900xtx", "mi300x")
    )
    assert instinct.settings["train.vllm_enable_sleep_mode"] is True
    assert radeon.settings["train.vllm_enable_sleep_mode"] is False


def test_advice_for_a_mac_is_what_it_can_do(composed: Compose) -> None:
    line = ("+gpu=apple", "gpu.memory_gb=64", "peft=none", "model=qwen2_5_14b")
    config = composed(*line)
    advice = advise(line, config, make_plan(config))
    assert advice
    for suggestion in advice:
        check(composed(*line, *suggestion["overrides"]))


def test_the_table_for_a_mac_has_what_it_can_do(composed: Compose) -> None:
    cells = plan_cells(["+gpu=apple", "gpu.memory_gb=64"])["cells"]
    assert {cell["method"] for cell in cells} == {"full", "+ checkpointing", "LoRA", "QLoRA"}


def test_vllm_is_not_chosen_where_it_cannot_run(composed: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "find_spec", lambda name: ModuleSpec(name, None))
    for line, chosen in (
        (("+gpu=apple",), False),
        (("+gpu=mi300x",), True),
        (("+gpu=mi300x", "peft=qlora"), False),
        (("+gpu=h100", "peft=qlora"), True),
    ):
        assert make_plan(composed(*line, "generation=auto")).settings["train.use_vllm"] is chosen, line


@pytest.mark.parametrize(("memory", "allowed"), [(16, 16 * 2 / 3), (32, 32 * 2 / 3), (36, 27), (128, 96)])
def test_a_mac_may_use_a_part_of_its_memory(composed: Compose, memory: int, allowed: float) -> None:
    plan = make_plan(composed("+gpu=apple", f"gpu.memory_gb={memory}"))
    assert plan.capacity_gb == pytest.approx(allowed)
    assert (plan.shared_gb, plan.host_capacity_gb, plan.here) == (memory, None, False)


def test_shared_memory_is_that_which_the_processes_leave(composed: Compose) -> None:
    plan = make_plan(composed("+gpu=gb10"))
    assert plan.capacity_gb == 128 - sum(plan.host.values())
    paged = make_plan(composed("+gpu=gb10", "peft=none", "model=qwen2_5_7b", "train.optim=paged_adamw_8bit"))
    assert paged.capacity_gb == pytest.approx(128 - paged.host_gb)
    assert paged.host_gb > plan.host_gb + 10, "what is offloaded is in the same memory"


@pytest.mark.parametrize(
    ("libraries", "problem"),
    [
        (("rocm64", "rocm72"), None),
        (("rocm64", "cuda130"), "the installed bitsandbytes has no library for ROCm 7.1.2 (it has: 64)"),
        ((), "the installed bitsandbytes has no library for ROCm 7.1.2 (it has: none)"),
    ],
)
def test_bitsandbytes_needs_a_library_for_this_rocm(
    composed: Compose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, libraries: tuple[str, ...], problem: str | None
) -> None:
    for name in libraries:
        (tmp_path / f"libbitsandbytes_{name}.so").touch()
    spec = ModuleSpec("bitsandbytes", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(devices, "find_spec", lambda name: spec if name == "bitsandbytes" else None)
    monkeypatch.setattr(devices, "build_of_pytorch", lambda: {"hip": "7.1.2"})
    monkeypatch.setattr(devices, "local_vendor", lambda: "amd")
    if problem is None:
        check(composed("+gpu=mi300x"))
        with pytest.raises(ConfigError, match="flash-attn for ROCm is not installed; use sdpa"):
            check(composed("+gpu=mi300x", "model.attn_implementation=flash_attention_2"))
        return
    for line, key in ((("peft=lora",), "train.optim=adamw_8bit"), (("peft=qlora",), "peft.quantization")):
        with pytest.raises(ConfigError) as raised:
            check(composed("+gpu=mi300x", *line))
        assert str(raised.value) == f"{key}: {problem}; use peft=lora train.optim=adamw_torch"
    check(composed("+gpu=mi300x", "train.optim=adamw_torch"))


def test_a_run_without_a_profile_is_of_the_gpu_here(composed: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "local_vendor", lambda: "apple")
    with pytest.raises(ConfigError, match="bitsandbytes has none for MPS"):
        check(composed("train.optim=adamw_8bit"))
    monkeypatch.setattr(machine, "free_gpu_memory", lambda processes: ("Apple M3", 20.0 * GB, 15.0 * GB))
    monkeypatch.setattr(machine, "on_mac", lambda: True)
    plan = make_plan(composed())
    assert (plan.device, plan.capacity_gb, plan.unified) == ("Apple M3", 15.0, False)
