"""From a command line to a plan: its machine, its choices and its advice."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from omegaconf import DictConfig, OmegaConf

from benchmarks.tiny_policies import tiny_config
from grpo.config.check import check
from grpo.config.resolve import resolve
from grpo.planning import fit, from_config, machine
from grpo.planning.advice import MAX_SUGGESTIONS, Planner, advise
from grpo.planning.fit import HEADROOM, MAX_TOKENS, Plan, make_plan
from grpo.planning.from_config import find_shape, workload_of
from grpo.planning.vllm_fraction import USEFUL_TOKENS
from grpo.planning.workload import Sharding
from grpo.utils.errors import ConfigError
from grpo.utils.limits import GB, USABLE
from tests.gpu_profiles import NAMES

Compose = Callable[..., DictConfig]
Advice = Callable[[tuple[str, ...]], list[dict[str, Any]]]
LARGE = ("+gpu=rtx3080", "model=llama3_1_8b", "peft=none")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_gpu_memory", lambda processes: None)


@pytest.fixture
def advice(composed: Compose) -> Advice:
    """A function from a command line to the suggestions for it."""

    def advice_on(line: tuple[str, ...]) -> list[dict[str, Any]]:
        config = composed(*line)
        return advise(line, config, make_plan(config))

    return advice_on


OF_3B = ("+gpu=rtx3080", "model=qwen2_5_3b")


# --- Profiles ---


@pytest.mark.parametrize("profile", NAMES)
def test_every_profile_fits_its_gpu_and_uses_half_of_it(composed: Compose, profile: str) -> None:
    plan = make_plan(composed(f"+gpu={profile}"))
    assert plan.problem is None
    tokens = plan.settings["update.max_tokens_per_microbatch"]
    assert plan.peak_gb <= (1 - HEADROOM) * plan.capacity_gb
    assert plan.peak_gb >= 0.5 * plan.capacity_gb or tokens == MAX_TOKENS
    assert tokens >= 2048, "too little at once to keep the GPU busy"


@pytest.mark.parametrize("profile", NAMES)
def test_every_profile_fits_with_vllm_or_is_advised_against_it(composed: Compose, profile: str, advice: Advice) -> None:
    line = (f"+gpu={profile}", "generation=vllm_colocate")
    if profile == "apple":
        with pytest.raises(ConfigError, match="vLLM has no wheel for PyTorch on a Mac; use generation=transformers"):
            make_plan(composed(*line))
        return
    plan = make_plan(composed(*line))
    if plan.problem:
        no_room = ("a100_1g_10gb", "rtx5090", "rtx3090_x2", "rtx3090_x4")
        assert profile in no_room, "two copies of the weights fit on every other"
        assert advice(line)
        assert profile.startswith("rtx3090") or advice(line)[0]["overrides"] == ["generation=transformers"]
    else:
        assert 0 < plan.settings["train.vllm_gpu_memory_utilization"] < 1


# --- What is chosen ---


def test_micro_batches_grow_with_the_gpu_within_what_is_usable(composed: Compose) -> None:
    tokens = []
    for memory in (8, 12, 16, 24):
        plan = make_plan(composed(*OF_3B, f"gpu.memory_gb={memory}"))
        assert plan.problem is None
        assert plan.peak_gb <= USABLE * memory
        tokens.append(plan.settings["update.max_tokens_per_microbatch"])
    assert tokens == sorted(tokens)
    assert tokens[0] < tokens[-1]


def test_fewer_completions_are_generated_at_once_on_a_small_gpu(composed: Compose) -> None:
    plan = make_plan(composed("+gpu=rtx3080", "model=qwen3_4b"))
    assert plan.problem is None
    assert plan.settings["rollout.completions_at_once"] < 64


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("model=qwen3_8b", "+peft.target_parameters=[mlp.experts.down_proj]"), "down_proj: the model has no experts"),
        (("model=gpt_oss_20b", "+peft.target_parameters=[experts.gate_upproj]"), "did you mean gate_up_proj"),
    ],
)
def test_experts_that_are_not_there_are_told_before_a_download(
    composed: Compose, line: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(composed("+gpu=h100", *line))


def test_a_cpu_pages_no_optimizer(composed: Compose) -> None:
    plans = [make_plan(composed("peft=none", f"train.optim={name}adamw_8bit")) for name in ("", "paged_")]
    assert plans[0].phases["update"] == plans[1].phases["update"]


def test_what_the_user_has_set_is_kept(composed: Compose) -> None:
    given = composed(
        "+gpu=h100",
        "generation=vllm_colocate",
        "train.vllm_gpu_memory_utilization=0.5",
        "train.vllm_enable_sleep_mode=true",
        "train.vllm_max_model_length=2000",
        "update.max_tokens_per_microbatch=3000",
    )
    plan = make_plan(given)
    assert plan.settings == {
        "engine.lora": "merged",
        "engine.share_weights": False,
        "update.max_tokens_per_microbatch": 3000,
    }
    assert plan.phases["rollout"]["vllm"] == 0.5 * 80


def test_a_model_of_text_with_images_is_refused(composed: Compose) -> None:
    with pytest.raises(ConfigError, match=r"task\.images=picture: the model takes text alone; choose one that takes"):
        make_plan(composed("+gpu=rtx3080", "task.images=picture"))
    assert not make_plan(composed("+gpu=h100", "model=qwen2_5_vl_3b", "task.images=picture")).problem


def test_the_plan_settles_open_values_only_for_this_machine(composed: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ("+gpu=rtx3080", "generation=vllm_colocate")
    config = composed(*line)
    elsewhere = resolve(config, make_plan(config))
    assert elsewhere.update.max_tokens_per_microbatch == "auto"
    assert elsewhere.train.vllm_gpu_memory_utilization == 0.3
    monkeypatch.setattr(machine, "free_gpu_memory", lambda processes: ("RTX 3080", 16 * GB, 15 * GB))
    plan = make_plan(config)
    assert plan.capacity_gb == 15, "what others have taken is not there"
    here = resolve(config, plan)
    assert here.update.max_tokens_per_microbatch == plan.settings["update.max_tokens_per_microbatch"]
    assert here.train.vllm_gpu_memory_utilization == plan.settings["train.vllm_gpu_memory_utilization"]


def test_without_a_profile_the_gpu_here_or_else_the_host_counts(
    composed: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make_plan(composed()).unified
    monkeypatch.setattr(machine, "free_gpu_memory", lambda processes: ("some GPU", 24 * GB, 20 * GB))
    plan = make_plan(composed())
    assert (plan.device, plan.capacity_gb, plan.unified) == ("some GPU", 20, False)
    assert make_plan(composed("train.use_cpu=true")).unified
    assert make_plan(composed("+gpu=h100")).capacity_gb == 80, "the plan is for a larger GPU than the one here"


OWN_WEIGHTS = ("generation=vllm_colocate", "engine.share_weights=false")


def test_shared_weights_leave_vllm_awake_on_a_smaller_gpu(composed: Compose) -> None:
    line = (*OF_3B, "generation=vllm_colocate")
    once, twice = (make_plan(composed(*line, f"engine.share_weights={value}")) for value in ("auto", "false"))
    assert (once.settings["engine.share_weights"], once.settings["train.vllm_enable_sleep_mode"]) == (True, False)
    assert twice.settings["train.vllm_enable_sleep_mode"] is True
    weights = twice.phases["load"]["weights"]
    assert "weights" not in once.phases["update"]
    assert once.phases["rollout"]["vllm"] > weights, "they are in vLLM's share"
    small = make_plan(composed(*line, "gpu.memory_gb=10"))
    assert small.problem is None
    assert make_plan(composed(*line, "gpu.memory_gb=10", "engine.share_weights=false")).problem is not None


def test_shared_prompts_weights_that_cannot_be_shared_is_refused(composed: Compose) -> None:
    line = ("+gpu=rtx3080", "generation=vllm_colocate", "engine.share_weights=true")
    with pytest.raises(ConfigError, match=r"engine\.share_weights=true: all weights are trained; use auto"):
        make_plan(composed(*line, "peft=none"))
    with pytest.raises(
        ConfigError, match=r"vLLM gets merged weights, a sleeping engine .* discards adapters; use auto"
    ):
        make_plan(composed(*line, "train.vllm_enable_sleep_mode=true"))


def test_an_engine_beside_a_quantized_policy_is_quantized_too(composed: Compose) -> None:
    plan = make_plan(composed("+gpu=rtx3080", "model=qwen2_5_7b", "peft=qlora", "generation=vllm_colocate"))
    assert plan.problem is None
    assert not plan.settings["train.vllm_enable_sleep_mode"]
    assert plan.phases["rollout"]["vllm"] < 2 * plan.phases["rollout"]["weights"]


def test_vllm_sleeps_only_where_the_update_leaves_no_room_for_it(composed: Compose) -> None:
    sleeps = {}
    for memory in (16, 24, 48, 80):
        plan = make_plan(composed(*OF_3B, f"gpu.memory_gb={memory}", *OWN_WEIGHTS))
        assert plan.problem is None
        sleeps[memory] = plan.settings["train.vllm_enable_sleep_mode"]
        assert (plan.phases["update"]["vllm"] < 1) == sleeps[memory]
    assert sleeps[16] is True
    assert sleeps[80] is False
    assert list(sleeps.values()) == sorted(sleeps.values(), reverse=True)


def test_no_engine_sleeps_between_turns_with_sharded_weights(composed: Compose) -> None:
    line = ("+gpu=rtx3080", *OWN_WEIGHTS, "plan.processes=2", "shard=fsdp2", "train.optim=adamw_torch")
    tools = ("task.tools=[grpo.builtin.tasks.calculator.calculator]", "task.conversational=true")
    sleeps = [make_plan(composed(*line, *more)).settings["train.vllm_enable_sleep_mode"] for more in ((), tools)]
    assert sleeps == [True, False]


def test_awake_vllm_leaves_useful_micro_batches_and_a_full_cache(
    composed: Compose,
) -> None:
    plans = [make_plan(composed(*OF_3B, f"gpu.memory_gb={memory}", *OWN_WEIGHTS)) for memory in range(16, 32)]
    awake = [plan for plan in plans if not plan.settings["train.vllm_enable_sleep_mode"]]
    assert 0 < len(awake) < len(plans)
    for plan in awake:
        assert plan.settings["update.max_tokens_per_microbatch"] >= USEFUL_TOKENS
        assert plan.phases["rollout"]["vllm"] == pytest.approx(awake[-1].phases["rollout"]["vllm"], abs=0.4)


def test_vllm_does_not_sleep_for_a_small_requested_share(composed: Compose) -> None:
    line = ("+gpu=h100", "model=qwen2_5_3b", "generation=vllm_colocate", "train.vllm_gpu_memory_utilization=0.2")
    plan = make_plan(composed(*line))
    assert plan.settings["train.vllm_enable_sleep_mode"] is False
    assert plan.phases["update"]["vllm"] == 0.2 * 80


@pytest.mark.parametrize(("lora", "needed"), [("merged", 5.75), ("adapter", 5.80)])
def test_a_share_too_small_for_vllms_weights_is_refused(composed: Compose, lora: str, needed: float) -> None:
    line = (*OF_3B, "generation=vllm_colocate", "train.vllm_gpu_memory_utilization=0.3", f"engine.lora={lora}")
    with pytest.raises(ConfigError, match=rf"too little for the {needed:.2f} GiB of vLLM's weights; null leaves it"):
        make_plan(composed(*line))


def test_with_a_server_nothing_is_generated_on_the_gpu(composed: Compose) -> None:
    line = ("+gpu=rtx3080", "generation=vllm_server", "train.max_completion_length=4096")
    plan = make_plan(composed(*line))
    assert "kv cache" not in plan.phases["rollout"]
    assert "transfer" not in plan.phases["rollout"], "an adapter alone takes next to nothing"
    assert make_plan(composed(*line, "engine.lora=merged")).phases["rollout"]["transfer"] == 3
    assert plan.problem is None
    assert "rollout.completions_at_once" not in plan.settings


def test_vllm_holds_the_longest_sequence_and_never_sleeps_on_cpu(composed: Compose) -> None:
    plan = make_plan(composed("generation=vllm_colocate", "train.max_completion_length=40"))
    assert plan.settings["train.vllm_max_model_length"] == 64 + 40
    assert plan.settings["train.vllm_enable_sleep_mode"] is False


def test_drafts_are_for_models_that_keep_no_state(composed: Compose) -> None:
    line = ("+gpu=h100", "generation=vllm_colocate", "engine.drafts=ngram")
    assert make_plan(composed(*line)).problem is None
    with pytest.raises(ConfigError, match=r"^engine\.drafts=ngram: layers of this model keep a state; leave it out"):
        make_plan(composed(*line, "model=qwen3_5_2b"))


def test_generation_auto_without_a_length_fails_with_one_line(composed: Compose) -> None:
    with pytest.raises(ConfigError, match=r"train\.max_completion_length=None: the plan needs a positive number"):
        make_plan(composed("generation=auto", "train.max_completion_length=null"))


@pytest.mark.parametrize(
    ("installed", "line", "chosen"),
    [
        (True, ("+gpu=h100",), True),
        (False, ("+gpu=h100",), False),
        (True, ("+gpu=h100", "peft=qlora"), True),
        (True, ("+gpu=h100", "peft=qlora", "engine.lora=merged"), False),
        (True, ("+gpu=h100", "train.top_p=0.9"), True),
        (True, ("+gpu=h100", "train.repetition_penalty=1.1"), False),
        (True, ("+gpu=h100", "model=tiny"), False),
        (True, (*OF_3B, "gpu.memory_gb=9"), False),
        (True, (), False),
        (True, ("model=smollm2_135m", "train.max_completion_length=128"), True),
        (True, ("model=smollm2_135m", "train.max_completion_length=8"), False),
    ],
)
def test_generation_auto_takes_vllm_where_it_works_fits_and_pays(
    composed: Compose, monkeypatch: pytest.MonkeyPatch, installed: bool, line: tuple[str, ...], chosen: bool
) -> None:
    monkeypatch.setattr(fit, "find_spec", lambda name: installed or None)
    config = composed(*line, "generation=auto")
    plan = make_plan(config)
    assert plan.problem is None
    assert plan.settings["train.use_vllm"] is chosen
    assert config.train.use_vllm is None, "planning changes nothing"
    plan.here = True
    assert resolve(config, plan).train.use_vllm is chosen


def test_vllm_over_several_gpus_needs_less_of_each(composed: Compose) -> None:
    line = ("+gpu=h100", *OWN_WEIGHTS, "plan.processes=2", "plan.host_gb=512")
    alone, both = (make_plan(composed(*line, f"train.vllm_tensor_parallel_size={n}")) for n in (1, 2))
    shares = [plan.settings["train.vllm_gpu_memory_utilization"] for plan in (alone, both)]
    assert shares[0] - shares[1] == pytest.approx(alone.phases["load"]["weights"] / 2 / 80, abs=0.02)


# --- Several devices ---


def test_sharding_is_read_from_trl_accelerate_and_deepspeed(
    composed: Compose, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def shards(*overrides: str) -> tuple[int, int, int, bool, bool]:
        found = workload_of(composed("plan.processes=4", *overrides), "cuda").sharding
        offloads = (found.offload_weights, found.offload_optimizer)
        return (found.weight_shards, found.gradient_shards, found.optimizer_shards, *offloads)

    assert shards() == (1, 1, 1, False, False)
    assert shards("train.fsdp=full_shard") == (4, 4, 4, False, False)
    assert shards("train.fsdp='shard_grad_op offload'") == (4, 4, 4, True, True)
    assert shards("train.fsdp=no_shard") == shards("train.fsdp=false") == (1, 1, 1, False, False)
    assert shards("train.fsdp=true", "+train.fsdp_config={fsdp_reshard_after_forward:false}")[:3] == (4, 4, 4)
    kept = composed("train.fsdp=true", "+train.fsdp_config={fsdp_reshard_after_forward:false}")
    assert workload_of(kept, "cuda").sharding.stage == 2, "the weights stay unsharded beside their shards"
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}))
    assert shards(f"train.deepspeed={file}") == (1, 4, 4, False, True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    assert shards() == (4, 4, 4, True, True)
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    assert shards() == (4, 4, 4, False, False)


def test_processes_are_those_of_torchrun_unless_they_are_given(
    composed: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert workload_of(composed("train.fsdp=full_shard"), "cuda").sharding.weight_shards == 16
    assert workload_of(composed(), "cuda").processes == 8, "host memory is that of one machine"
    assert workload_of(composed("plan.processes=2", "train.fsdp=full_shard"), "cuda").sharding.weight_shards == 2


@pytest.mark.parametrize(
    ("shard", "found"),
    [
        ("none", Sharding(processes=8)),
        ("fsdp2", Sharding("fsdp", 3, 8, float32=True)),
        ("fsdp2_offload", Sharding("fsdp", 3, 8, float32=True, offload_weights=True, offload_optimizer=True)),
        ("zero2", Sharding("deepspeed", 2, 8, float32=True, bucket=None)),
        ("zero3", Sharding("deepspeed", 3, 8, float32=True, gathers_to_generate=True, bucket=None)),
        (
            "zero3_offload",
            Sharding(
                "deepspeed",
                3,
                8,
                float32=True,
                offload_weights=True,
                offload_optimizer=True,
                gathers_to_generate=True,
                bucket=None,
            ),
        ),
    ],
)
def test_each_choice_of_shard_is_planned_as_what_it_is(composed: Compose, shard: str, found: Sharding) -> None:
    workload = workload_of(composed("+gpu=h100", "launch.processes=4", "launch.nodes=2", f"shard={shard}"), "cuda")
    assert workload.sharding == found
    assert workload.processes == 4, "host memory is that of one machine"


def test_keys_are_shared_by_sdpa_with_whole_weights_alone(composed: Compose) -> None:
    assert workload_of(composed(), "cpu").shares_keys
    assert workload_of(composed("shard=zero2", "launch.processes=2"), "cpu").shares_keys
    assert not workload_of(composed("model.attn_implementation=eager"), "cpu").shares_keys
    assert not workload_of(composed("shard=fsdp2", "launch.processes=2"), "cpu").shares_keys


def test_adapters_are_in_bfloat16_under_zero3_alone(composed: Compose) -> None:
    def adapter_of(*line: str) -> Any:
        return workload_of(composed("+gpu=h100", *line), "cuda").adapter

    assert [adapter_of(f"peft={method}").size for method in ("lora", "qlora")] == [4, 4]
    assert adapter_of("launch.processes=2", "peft=lora", "shard=zero3").size == 2, "and for DeepSpeed's buffers"
    assert adapter_of("launch.processes=2", "peft=lora", "shard=zero2").size == 4
    assert [adapter_of("peft=lora", f"peft.lora_dropout={rate}").dropout for rate in (0.0, 0.1)] == [False, True]


def test_only_zero3_without_vllm_gathers_weights_for_generation(
    composed: Compose,
) -> None:
    def gathers(*line: str) -> bool:
        return workload_of(composed("+gpu=h100", "launch.processes=2", *line), "cuda").sharding.gathers_to_generate

    assert gathers("shard=zero3")
    assert not gathers("shard=zero3", "train.ds3_gather_for_generation=false")
    assert not gathers("shard=zero3", "generation=vllm_colocate")
    assert not gathers("shard=zero2")


def test_a_float32_copy_of_rank_0_needs_host_memory(composed: Compose) -> None:
    line = ("+gpu=a100_80gb", "model=qwen2_5_14b", "peft=none", "launch.processes=8", "shard=fsdp2")
    plan = make_plan(composed(*line, "plan.host_gb=64"))
    assert plan.problem is not None
    assert "host memory" in plan.problem
    assert make_plan(composed(*line, "plan.host_gb=128")).problem is None


def test_a_sharded_policy_fits_where_one_gpu_does_not_hold_it(composed: Compose) -> None:
    line = ("+gpu=a100_40gb", "model=qwen2_5_7b", "peft=none", "plan.host_gb=512", "plan.processes=8")
    assert make_plan(composed(*line)).problem
    assert make_plan(composed(*line, "train.fsdp=full_shard")).problem is None


# --- Where the shape comes from ---


def test_the_shape_follows_the_typed_name_and_not_the_choice(composed: Compose) -> None:
    config = composed("+gpu=any", "model.model_name_or_path=Qwen/Qwen3-8B")
    assert find_shape(config.model).parameters() == 8190735360


def test_a_folder_says_its_shape_itself(composed: Compose, tmp_path: Path) -> None:
    numbers = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**numbers, "vocab_size": 100, "intermediate_size": 96}))
    shape = find_shape(composed(f"model.model_name_or_path={tmp_path}").model)
    assert (shape.hidden_size, shape.num_key_value_heads, shape.head_dim) == (64, 4, 16)


def test_a_model_of_ones_own_brings_its_shape_along(composed: Compose) -> None:
    line = [f"model.shape.{key}={value}" for key, value in {"hidden_size": 99, "num_hidden_layers": 7}.items()]
    shape = find_shape(composed("model.model_name_or_path=me/mine", *line).model)
    assert (shape.hidden_size, shape.num_hidden_layers) == (99, 7)
    assert shape.parameters() == replace(shape, given_parameters=0).parameters(), "not those of the choice below it"


# --- Advice ---


def test_every_suggestion_makes_the_run_fit_and_is_unique(composed: Compose, advice: Advice) -> None:
    suggestions = advice(LARGE)
    assert 0 < len(suggestions) <= MAX_SUGGESTIONS
    for suggestion in suggestions:
        assert make_plan(composed(*replaced(LARGE, suggestion["overrides"]))).problem is None
    assert len({tuple(suggestion["overrides"]) for suggestion in suggestions}) == len(suggestions)


def replaced(line: tuple[str, ...], overrides: list[str]) -> list[str]:
    keys = {word.split("=")[0] for word in overrides}
    return [word for word in line if word.lstrip("+").split("=")[0] not in keys] + overrides


@pytest.mark.parametrize(
    ("line", "first"),
    [
        (("update.max_tokens_per_microbatch=200000",), ["update.max_tokens_per_microbatch=auto"]),
        (
            ("train.gradient_checkpointing=false", "model=qwen2_5_7b", "gpu.memory_gb=18.7"),
            ["train.gradient_checkpointing=true"],
        ),
        (
            (*OWN_WEIGHTS, "train.vllm_enable_sleep_mode=false", "train.vllm_gpu_memory_utilization=0.6"),
            ["train.vllm_gpu_memory_utilization=null"],
        ),
        (("peft=none", "model=qwen2_5_1_5b", "gpu.memory_gb=13"), ["update.gradients_on_host=true"]),
        (
            ("peft=none", "train.optim=adamw_torch_fused", "model=qwen2_5_1_5b", "gpu.memory_gb=11"),
            ["update.gradients_on_host=true", "train.optim=adamw_8bit"],
        ),
        (("peft=none",), ["train.optim=paged_adamw_8bit"]),
        (("model=llama3_1_8b",), ["peft=qlora"]),
    ],
)
def test_the_first_suggestion_is_the_one_that_does_least_harm(
    line: tuple[str, ...], first: list[str], advice: Advice
) -> None:
    assert advice((*OF_3B, *line))[0]["overrides"] == first


def test_nothing_that_changes_the_algorithm_is_suggested(advice: Advice) -> None:
    allowed = (
        "update.max_tokens_per_microbatch",
        "update.gradients_on_host",
        "train.vllm_",
        "train.gradient_checkpointing",
        "train.optim",
        "train.max_completion_length",
        "generation",
        "model",
        "peft",
        "launch.",
        "shard",
    )
    for line in (LARGE, ("+gpu=t4", "model=qwen2_5_14b"), ("+gpu=any", "peft=none", "model=llama3_2_3b")):
        for suggestion in advice(line):
            assert all(word.startswith(allowed) for word in suggestion["overrides"])
            assert suggestion["effect"]


SEVERAL = ("+gpu=a100_80gb", "peft=none", "model=qwen2_5_7b", "train.optim=adamw_torch_fused")


@pytest.mark.parametrize(
    ("line", "suggested"),
    [
        (("launch.processes=4", "gpu.memory_gb=40"), "shard=fsdp2"),
        (("launch.processes=4", "gpu.memory_gb=24"), "shard=fsdp2_offload"),
        (("launch.processes=2", "gpu.memory_gb=40", "shard=fsdp2"), "launch.processes=4"),
        (("plan.processes=2", "gpu.memory_gb=40", "shard=fsdp2"), "plan.processes=4"),
        (("launch.processes=8", "gpu.memory_gb=18", "shard=fsdp2"), "launch.nodes=2"),
        (("launch.processes=2", "shard=fsdp2_offload", "plan.host_gb=128"), "shard=fsdp2"),
        (("launch.processes=8", "shard=fsdp2", "plan.host_gb=50"), "shard=zero3"),
        (("launch.processes=4", "gpu.memory_gb=32", "shard=zero2"), "shard=zero3_offload"),
    ],
)
def test_several_processes_divide_offload_and_become_more(
    line: tuple[str, ...], suggested: str, advice: Advice
) -> None:
    assert [suggested] in [suggestion["overrides"] for suggestion in advice((*SEVERAL, *line))]


def test_a_policy_that_nothing_else_makes_fit_is_sharded(advice: Advice) -> None:
    line = ("+gpu=rtx3080", "model.model_name_or_path=Qwen/Qwen2.5-14B-Instruct", "peft=lora", "peft.r=8")
    overrides = [suggestion["overrides"] for suggestion in advice(line)]
    assert overrides
    assert all(words[0].startswith("launch.processes=") for words in overrides)
    assert ["launch.processes=4", "shard=fsdp2"] in overrides


def test_what_is_offloaded_without_need_is_put_back_onto_the_gpu(advice: Advice) -> None:
    suggestion = advice((*SEVERAL, "launch.processes=8", "shard=fsdp2_offload"))[0]
    assert suggestion["overrides"] == ["shard=fsdp2"]
    assert advice((*SEVERAL, "launch.processes=8", "shard=zero3_offload"))[0]["overrides"] == ["shard=zero3"]


def test_gathering_for_generation_is_given_up_before_offloading(advice: Advice) -> None:
    line = ("+gpu=rtx3080", "model=qwen2_5_14b", "peft=lora", "launch.processes=8", "shard=zero3", "plan.host_gb=512")
    assert advice(line)[0]["overrides"] == ["train.ds3_gather_for_generation=false"]


def test_completions_are_made_as_short_as_they_have_to_be(advice: Advice) -> None:
    (first, *_) = advice(("+gpu=rtx3080", "train.max_completion_length=1000000", "peft=qlora"))
    *others, word = first["overrides"]
    assert others == ["update.activations_on_host=true", "update.mlp_tile=4096"], "which change no result"
    key, _, length = word.partition("=")
    assert key == "train.max_completion_length"
    assert 128 <= int(length) < 1000000 / 4


def test_another_optimizer_is_not_suggested(advice: Advice) -> None:
    for suggestion in advice(("+gpu=rtx3080", "peft=none", "train.optim=sgd", "model=qwen3_4b")):
        assert not any(word.startswith("train.optim") for word in suggestion["overrides"])


def test_a_gpu_that_is_hardly_used_is_put_to_use(advice: Advice) -> None:
    suggestions = advice(("+gpu=h200", "model=qwen2_5_0_5b"))
    assert any("model=" in suggestion["overrides"][0] for suggestion in suggestions)
    assert all(suggestion["peak_gb"] <= (1 - HEADROOM) * 141 for suggestion in suggestions)
    assert advice(("+gpu=rtx3080",)) == [], "nothing to advise where it fits well"


def test_choices_that_typed_values_would_spoil_are_not_suggested(advice: Advice) -> None:
    for line in (
        ("+gpu=h200", "model=qwen2_5_0_5b", "peft.r=64"),
        ("+gpu=h200", "model.model_name_or_path=Qwen/Qwen3-0.6B"),
    ):
        suggestions = advice(line)
        assert suggestions
        for suggestion in suggestions:
            assert not suggestion["overrides"][0].startswith("peft=" if "peft.r=64" in line else "model=")


def test_offloaded_gradients_are_suggested_only_where_they_work(advice: Advice) -> None:
    for line in (("+gpu=t4", "peft=none", "model.dtype=float32"), ("+gpu=h100", "peft=none", "plan.processes=8")):
        assert not any("update.gradients_on_host=true" in found["overrides"] for found in advice(line))


def test_vllms_share_is_of_the_gpus_total_and_not_free_memory(
    composed: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ("+gpu=rtx3080", "generation=vllm_colocate")
    alone = make_plan(composed(*line))
    monkeypatch.setattr(machine, "free_gpu_memory", lambda processes: ("a GPU of 32 GB", 32 * GB, 20 * GB))
    larger = make_plan(composed(*line))
    shares = [plan.settings["train.vllm_gpu_memory_utilization"] for plan in (alone, larger)]
    assert shares[1] == pytest.approx(shares[0] / 2, abs=0.01)
    assert larger.phases["rollout"]["vllm"] == pytest.approx(32 * shares[1])


def test_planning_again_replaces_what_was_typed() -> None:
    config = Planner(["+gpu=rtx3080", "peft=none", "train.optim=sgd"]).config(
        {"peft": "qlora", "train.optim": "adamw_8bit"}
    )
    assert config.peft.quantization.load_in_4bit
    assert config.train.optim == "adamw_8bit"


# --- Wrong input ---


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("+gpu=rtx3080", "gpu.memory_gb=0"), "gpu.memory_gb=0.0: the GPU's memory in GiB"),
        (("+gpu=rtx3080", "gpu.memory_gb=inf"), "gpu.memory_gb=inf: the GPU's memory in GiB"),
        (("+gpu=rtx3080", "gpu.memory_gb=1e9"), "gpu.memory_gb=1000000000.0: the GPU's memory in GiB, above 0 and"),
        (("+gpu=rtx3080", "gpu.memory_gb=-16"), "gpu.memory_gb=-16.0: the GPU's memory in GiB"),
        (("plan.processes=0",), "plan.processes=0: the plan needs a positive number"),
        (("plan.host_gb=-1",), "plan.host_gb=-1.0: a positive number of GiB"),
        (("peft=lora", "peft.r=-4"), "peft.r=-4: a positive number is needed"),
        (("train.vllm_tensor_parallel_size=0",), "train.vllm_tensor_parallel_size=0: the plan needs a positive"),
        (("model.dtype=int3",), "model.dtype=int3: possible: auto, float32, float16, bfloat16"),
        (("train.deepspeed=nowhere.json",), "train.deepspeed=nowhere.json: "),
        (
            ("model.model_name_or_path=me/mine", "model.shape.hidden_size=-1"),
            "model.shape of me/mine: hidden_size=-1: a positive number is needed",
        ),
    ],
)
def test_wrong_input_is_one_line(composed: Compose, line: tuple[str, ...], message: str) -> None:
    config = composed(*line)
    check(config)
    with pytest.raises(ConfigError) as raised:
        make_plan(config)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


def test_a_batch_larger_than_the_data_fails_early_with_one_line(composed: Compose) -> None:
    with pytest.raises(ConfigError, match="7 problems to train on, and a batch takes 16"):
        check(composed("task.dataset.size=7", "train.num_generations=8"))


def test_a_model_without_shape_or_network_fails_with_one_line(composed: Compose) -> None:
    with pytest.raises(ConfigError) as raised:
        make_plan(composed("+gpu=any", "model.model_name_or_path=nobody/nothing"))
    assert str(raised.value).startswith("model.model_name_or_path=nobody/nothing: neither a folder nor a model")
    assert "\n" not in str(raised.value)


def test_a_folder_that_is_not_there_needs_its_shape(composed: Compose) -> None:
    with pytest.raises(ConfigError, match=r"model.model_name_or_path=\./nope: there is no such folder"):
        make_plan(composed("model.model_name_or_path=./nope"))
    make_plan(composed("model.model_name_or_path=./nope", "model.shape.hidden_size=96", "model.shape.head_dim=24"))


def test_a_configuration_on_the_hub_is_read_from_the_cache(composed: Compose, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(OmegaConf.to_container(composed("model=qwen3_4b").model.shape)))
    with mock.patch("huggingface_hub.try_to_load_from_cache", return_value=str(file)) as cache:
        shape = from_config.from_hub("Qwen/Qwen3-4B-Base", "main")
    assert shape.parameters() == 4022468096
    assert cache.call_args.args == ("Qwen/Qwen3-4B-Base", "config.json")


def test_a_plan_says_the_same_in_json(composed: Compose) -> None:
    plan = make_plan(composed(*LARGE))
    assert "of which 14.7 GiB may be used" in (plan.problem or "")
    content = json.loads(json.dumps(plan.as_dict()))
    assert {"fits", "peak_gb", "capacity_gb", "host_gb", "phases", "suggestions"} <= content.keys()
    assert content["fits"] is False
    assert content["peak_gb"] == pytest.approx(max(sum(parts.values()) for parts in content["phases"].values()))


def test_expected_readings_exclude_memory_outside_pytorch() -> None:
    phases = {
        "load": {"context": 1.0, "weights": 2.0},
        "rollout": {"context": 1.0, "weights": 2.0, "kv cache": 3.0},
        "logprobs": {"context": 1.0, "weights": 2.0},
        "update": {"context": 1.0, "weights": 2.0, "gradients": 2.0},
    }
    plan = Plan("m", "d", phases, 10.0, {}, None, {})
    assert plan.expected() == {"peak": 5.0, "generate": 5.0, "logprobs": 2.0, "update": 4.0}


def test_vllm_on_a_cpu_takes_no_mixture_of_experts(composed: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"vLLM on a CPU repacks experts.*use generation=transformers"):
        make_plan(composed("model=gpt_oss_20b", "generation=vllm_colocate"))
    monkeypatch.setattr("grpo.planning.fit.find_spec", lambda name: name)
    monkeypatch.setattr("grpo.planning.fit.VLLM_PAYS", {"cpu": (0, 0)})
    assert make_plan(composed("model=gpt_oss_20b", "generation=auto")).settings["train.use_vllm"] is False


def test_experts_that_vllm_gets_merged_are_planned_or_refused_so(composed: Compose, tmp_path: Path) -> None:
    tiny_config("qwen3_moe").save_pretrained(tmp_path)
    line = ("+gpu=h100", f"model.model_name_or_path={tmp_path}", "generation=vllm_server")
    lora = composed(*line, "peft=lora")
    assert not workload_of(lora, "cuda", "qwen3_moe").sends_adapter
    assert workload_of(lora, "cuda", "gpt_oss").sends_adapter
    with pytest.raises(ConfigError, match=r"peft.quantization: vLLM's LoRA cannot take adapters of stacked experts"):
        make_plan(composed(*line, "peft=qlora"))
    with pytest.raises(ConfigError, match=r"engine.quantization: vLLM's LoRA cannot take adapters of stacked experts"):
        make_plan(composed(*line[:-1], "generation=vllm_colocate", "peft=lora", "engine.quantization=fp8"))
