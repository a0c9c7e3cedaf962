"""Memory of a policy that FSDP2 or DeepSpeed divides, against hand arithmetic from their definitions."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulation import simulate
from grpo.planning.from_config import shipped_models
from grpo.planning.host import host, locked
from grpo.planning.hub_config import shape_of
from grpo.planning.memory import logprobs, peak, rollout, unsharded_gradients, update
from grpo.planning.persistent import persistent
from grpo.planning.workload import Adapter, Sharding, Workload
from grpo.utils.limits import GB

SHAPE = shipped_models()["llama3_1_8b"][1]
P = 8_030_261_248
EMBEDDING = 128256 * 4096
LAYER = (P - 2 * EMBEDDING) / 32
WORKLOAD = Workload(512, 512, 4, 1024, optimizer="adamw_torch_fused", checkpointing=True, processes=8)
DDP = replace(WORKLOAD, sharding=Sharding(processes=8))
FSDP2 = replace(WORKLOAD, sharding=Sharding("fsdp", 3, 8, float32=True))
ZERO2 = replace(WORKLOAD, sharding=Sharding("deepspeed", 2, 8, float32=True))
ZERO3 = replace(WORKLOAD, sharding=Sharding("deepspeed", 3, 8, float32=True, gathers_to_generate=True))


def with_sharding(workload: Workload, **changes: Any) -> Workload:
    return replace(workload, sharding=replace(workload.sharding, **changes))


def offloaded(workload: Workload) -> Workload:
    return with_sharding(workload, offload_weights=True, offload_optimizer=True)


def test_ddp_holds_everything_and_its_gradients_twice() -> None:
    parts = update(SHAPE, DDP)
    assert parts["weights"] == parts["gradients"] == parts["buckets"] == 2 * P
    assert parts["optimizer"] == 4 * P
    assert "buckets" not in {name for name, size in update(SHAPE, replace(WORKLOAD, processes=1)).items() if size}


def test_fsdp2_divides_float32_weights_gradients_and_adamw() -> None:
    parts = update(SHAPE, FSDP2)
    assert parts["weights"] == 4 * P / 8
    assert parts["gradients"] == 4 * P / 8
    assert parts["optimizer"] == 8 * P / 8
    assert parts["master weights"] == parts["buckets"] == 0
    assert parts["unsharded weights"] == 2 * (EMBEDDING + max(EMBEDDING, 2 * LAYER))
    assert unsharded_gradients(SHAPE, FSDP2) == pytest.approx(2 * 2 * LAYER)


def test_fsdp2_unshards_two_layers_and_a_tied_embedding() -> None:
    shape = shipped_models()["llama3_2_1b"][1]
    layer = (shape.parameters() - shape.embeddings) / 16
    assert persistent(shape, FSDP2)["unsharded weights"] == 2 * (shape.embeddings + 2 * layer)
    long = {"tokens": 32768, "checkpointing": True}  # the layers' work then exceeds the head's
    work = [update(shape, replace(workload, **long))["backward"] for workload in (FSDP2, DDP)]
    assert work[0] - work[1] == pytest.approx(2 * 2 * layer)


def test_fsdp2_divides_a_frozen_tower_in_half_precision() -> None:
    shape = shipped_models()["qwen2_5_vl_3b"][1]
    assert shape.vision
    tower = shape.vision.tower_parameters()
    trained, frozen = (persistent(shape, replace(FSDP2, freeze=parts)) for parts in ((), ("vision",)))
    assert trained["vision weights"] - frozen["vision weights"] == pytest.approx((4 - 2) * tower / 8)
    assert trained["weights"] == frozen["weights"]
    loading = (host(shape, replace(FSDP2, freeze=parts))["loading"] for parts in ((), ("vision",)))
    assert next(loading) - next(loading) == (4 - 2) * tower


def test_fsdp2_without_resharding_keeps_all_weights_unsharded() -> None:
    parts = update(SHAPE, with_sharding(FSDP2, stage=2))
    assert (parts["weights"], parts["unsharded weights"]) == (4 * P / 8, 2 * P)


def test_fsdp2_in_pure_half_precision_divides_half_as_much() -> None:
    parts = update(SHAPE, with_sharding(FSDP2, float32=False))
    assert parts["weights"] == parts["gradients"] == 2 * P / 8
    assert parts["optimizer"] == 4 * P / 8


def test_zero2_divides_gradients_and_adamw_but_not_the_weights() -> None:
    parts = update(SHAPE, ZERO2)
    assert parts["weights"] == 2 * P
    assert parts["master weights"] == 4 * P / 8
    assert parts["optimizer"] == 8 * P / 8
    assert parts["buckets"] == 2 * 5e8
    assert parts["gradients"] == 2 * P / 8
    assert parts["unsharded weights"] == 0


def test_zero3_divides_weights_and_keeps_a_billion_unsharded() -> None:
    parts = update(SHAPE, ZERO3)
    assert parts["weights"] == 2 * P / 8
    assert parts["master weights"] == 4 * P / 8
    assert parts["unsharded weights"] == 2 * 1e9
    assert update(SHAPE, with_sharding(ZERO3, live_parameters=1e8))["unsharded weights"] == 2 * 1e8
    assert update(SHAPE, with_sharding(ZERO3, bucket=None))["buckets"] == 2 * 4096**2


def test_zero3_generates_with_unsharded_weights_and_fsdp2_never() -> None:
    assert rollout(SHAPE, ZERO3)["unsharded weights"] == 2 * P
    assert logprobs(SHAPE, ZERO3)["unsharded weights"] == 2 * 1e9, "only while it generates"
    assert rollout(SHAPE, with_sharding(ZERO3, gathers_to_generate=False))["unsharded weights"] == 2 * 1e9
    assert rollout(SHAPE, FSDP2)["unsharded weights"] < 2 * P / 4


def test_an_adapter_divides_its_frozen_base_in_half_precision() -> None:
    workload = replace(FSDP2, adapter=Adapter(16))
    assert persistent(SHAPE, workload)["weights"] == 2 * P / 8
    assert persistent(SHAPE, replace(workload, adapter=Adapter(16), quantized=4))["weights"] > 0.5 * LAYER * 32


def test_a_reference_under_fsdp2_is_unsharded_while_it_scores() -> None:
    workload = replace(FSDP2, reference=True)
    assert persistent(SHAPE, workload)["reference"] == 2 * P / 8
    assert logprobs(SHAPE, workload)["unsharded reference"] == 2 * P
    assert logprobs(SHAPE, replace(ZERO3, reference=True))["unsharded reference"] == 2 * 1e9
    assert persistent(SHAPE, replace(ZERO2, reference=True))["reference"] == 2 * P
    assert logprobs(SHAPE, FSDP2)["unsharded reference"] == 0


@pytest.mark.parametrize("tied", [False, True])
def test_an_fsdp2_update_takes_what_a_simulated_process_takes(tied: bool) -> None:
    numbers = {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1500,
        "num_hidden_layers": 3,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 8000,
        "tie_word_embeddings": tied,
    }
    workload = replace(FSDP2, prompt=0, completion=600, sequences=2, tokens=1200)
    parts = update(shape_of(numbers), workload)
    simulated = simulate(numbers, "full", checkpointing=True, rows=2, length=600, processes=8)
    assert sum(parts.values()) - parts["context"] == pytest.approx(simulated, rel=0.05)


# --- Offloading ---


@pytest.mark.parametrize("workload", [FSDP2, ZERO3])
def test_offloading_leaves_only_unsharded_weights_and_buffers(workload: Workload) -> None:
    parts = update(SHAPE, offloaded(workload))
    assert parts["weights"] == parts["gradients"] == 0
    assert parts.get("optimizer", 0) == parts["master weights"] == 0
    assert parts["unsharded weights"] == update(SHAPE, workload)["unsharded weights"]
    assert sum(parts.values()) < sum(update(SHAPE, workload).values())


def test_fsdp2_offload_locks_host_memory_in_powers_of_two() -> None:
    parts = host(
        SHAPE, replace(offloaded(FSDP2), processes=2, sharding=replace(offloaded(FSDP2).sharding, processes=2))
    )
    assert parts["offloaded optimizer"] == 8 * P
    assert 4 * P <= parts["offloaded weights"] < 2 * 4 * P
    assert parts["offloaded gradients"] == parts["offloaded weights"]
    assert (locked(2**20), locked(2**20 + 1)) == (2**20, 2**21)


def test_zero3_offload_keeps_all_states_in_host_memory() -> None:
    parts = host(SHAPE, offloaded(ZERO3))
    assert parts["offloaded weights"] == 8 * locked(2 * P / 8)
    assert parts["offloaded gradients"] == 8 * (locked(2 * P / 8) + locked(4 * P / 8))
    assert parts["offloaded master weights"] == 4 * P
    assert parts["offloaded optimizer"] == 8 * P


@pytest.mark.parametrize("workload", [offloaded(FSDP2), offloaded(ZERO3), FSDP2])
def test_two_machines_of_four_each_have_half_of_one_of_eight(workload: Workload) -> None:
    alone, half = host(SHAPE, workload), host(SHAPE, replace(workload, processes=4))
    assert alone.keys() == half.keys()
    of_rank_0 = {"loading"}  # the machine with rank 0 holds the same
    assert all(half[name] == alone[name] / (1 if name in of_rank_0 else 2) for name in alone)


def test_rank_0_loads_all_weights_in_float32_under_fsdp2() -> None:
    assert host(SHAPE, FSDP2)["loading"] == 2 * P + 4 * P
    assert host(SHAPE, replace(FSDP2, adapter=Adapter(16)))["loading"] == 2 * P
    assert host(SHAPE, DDP)["loading"] == host(SHAPE, ZERO3)["loading"] == 2 * P
    assert "loading" not in host(SHAPE, replace(WORKLOAD, processes=1))


def test_paged_optimizers_of_all_processes_are_in_host_memory() -> None:
    one = host(SHAPE, replace(WORKLOAD, processes=1, optimizer="paged_adamw_32bit"))
    several = host(SHAPE, replace(DDP, optimizer="paged_adamw_32bit"))
    assert several["offloaded optimizer"] == 8 * one["offloaded optimizer"] == 8 * 8 * P


# --- More processes ---

shardings = st.builds(
    Sharding,
    library=st.sampled_from(["fsdp", "deepspeed"]),
    stage=st.sampled_from([2, 3]),
    processes=st.integers(1, 64),
    float32=st.booleans(),
    offload_weights=st.booleans(),
    offload_optimizer=st.booleans(),
    gathers_to_generate=st.booleans(),
)
workloads = st.builds(
    Workload,
    prompt=st.integers(1, 2000),
    completion=st.integers(1, 4000),
    sequences=st.integers(1, 64),
    tokens=st.integers(1, 16384),
    adapter=st.none() | st.builds(Adapter, st.integers(1, 256)),
    optimizer=st.sampled_from(["adamw_torch", "adamw_torch_fused", "adamw_8bit"]),
    checkpointing=st.booleans(),
    reference=st.booleans(),
    sharding=shardings,
)
shapes = st.sampled_from([shape for _, shape in shipped_models().values()])


@given(shapes, workloads, st.integers(1, 64))
def test_more_processes_never_take_more_of_each_gpu(shape: Any, workload: Workload, more: int) -> None:
    larger = with_sharding(workload, processes=workload.sharding.processes + more)
    assert peak(shape, larger) <= peak(shape, workload) + 1


@given(shapes, workloads)
def test_offloading_never_takes_more_of_the_gpu(shape: Any, workload: Workload) -> None:
    assert peak(shape, offloaded(workload)) <= peak(shape, workload)


def test_eight_gpus_of_40_gb_hold_a_tuning_that_one_does_not() -> None:
    alone = replace(WORKLOAD, processes=1, sharding=Sharding())
    assert peak(SHAPE, FSDP2) < 36 * GB < peak(SHAPE, alone)
