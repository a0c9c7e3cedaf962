import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

from grpo.config import facts
from grpo.config.batch import check_groups, check_whole_groups
from grpo.config.check import check, check_deepspeed, check_report_to, check_shard
from grpo.config.check_rewards import check_files_of_rewards
from grpo.config.facts import sharding_strategy
from grpo.config.messages import meant
from grpo.options import LOSS_MEANS
from grpo.prepared import checked
from grpo.utils.diagnosis import sampling_filters
from grpo.utils.errors import ConfigError

sizes = st.integers(1, 40)


def batch(size: int, slices: int, generations: int, generation_batch_size: int | None = None) -> DictConfig:
    return OmegaConf.create(
        {
            "per_device_train_batch_size": size,
            "gradient_accumulation_steps": slices,
            "steps_per_generation": None,
            "generation_batch_size": generation_batch_size,
            "num_generations": generations,
        }
    )


def suggestions(message: str, key: str) -> list[int]:
    _, found, rest = message.partition(f" train.{key}=")
    return [int(number) for number in rest.split(";")[0].split(", ")] if found else []


@given(size=sizes, slices=sizes, generations=st.integers(2, 40))
def test_a_batch_passes_exactly_when_it_holds_whole_groups(size: int, slices: int, generations: int) -> None:
    whole = size * slices % generations == 0
    try:
        check_groups(batch(size, slices, generations))
    except ConfigError:
        assert not whole
    else:
        assert whole


@given(size=sizes, slices=sizes, generations=st.integers(2, 40))
def test_every_suggested_size_is_valid_and_none_is_nearer(size: int, slices: int, generations: int) -> None:
    try:
        check_groups(batch(size, slices, generations))
    except ConfigError as error:
        for number in suggestions(str(error), "num_generations"):
            check_groups(batch(size, slices, number))
        nearest = suggestions(str(error), "per_device_train_batch_size")
        assert nearest
        for number in nearest:
            check_groups(batch(number, slices, generations))
        between = range(min(nearest) + 1 if min(nearest) < size else 1, max(nearest))
        for number in between:
            with pytest.raises(ConfigError):
                check_groups(batch(number, slices, generations))


def test_every_process_counts_for_a_batch() -> None:
    with mock.patch.dict(os.environ, WORLD_SIZE="4"):
        check_groups(batch(2, 1, 8))
    with pytest.raises(ConfigError, match="a batch of 2 completions"):
        check_groups(batch(2, 1, 8))


def test_a_group_that_is_compared_stays_in_one_process() -> None:
    check_whole_groups(batch(8, 1, 8), ["concise"], 2)
    check_whole_groups(batch(4, 1, 8), [], 2)
    with pytest.raises(ConfigError, match=r"concise: compares the 8 completions of a group, and each process gen.* 4:"):
        check_whole_groups(batch(4, 1, 8), ["concise"], 2)


def test_a_generation_batch_that_was_set_counts() -> None:
    check_groups(batch(3, 1, 8, generation_batch_size=24))
    with pytest.raises(ConfigError, match="a batch of 20 completions"):
        check_groups(batch(8, 1, 8, generation_batch_size=20))


def test_close_names_are_offered_once() -> None:
    assert meant("modle", ["model", "model", "task"]) == "; did you mean model?"
    assert meant("x", ["model", "task"]) == "; possible: model, task"
    assert meant("x", map(str, range(1000))) == ""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward=[]"], "at least one reward function"),
        (["+train.num_generation=4"], "train.num_generation: no such key; did you mean num_generations"),
        (["+train.hub_token=secret"], "HF_TOKEN"),
        (["train.use_liger_kernel=true"], "train.use_liger_kernel=true: TRL will remove it"),
        (["+reward.mine.weight=2"], "reward.mine.fn: needs a value"),
        (
            ["reward.correctness.weight=much"],
            "reward.correctness.weight: Value 'much' of type 'str'",
        ),
        (["+reward.mine.fm=x.py:f"], "reward.mine.fm: no such key"),
        (["reward.correctness.weight=0"], "reward: all weights are 0"),
        (["train.beta=-1"], "train.beta=-1: 0 or more"),
        (["train.max_steps=-5"], "train.max_steps=-5"),
        (["train.seed=-4"], "train.seed=-4: from 0 to"),
        (["task.eval.size=-3"], "task.eval.size=-3: a number of held-out problems, or 0"),
        (["update.gradients_on_host=true", "train.optim=lomo"], "train.optim=lomo steps during the backward pass"),
        (["+reward.step.fn=rewards.format.format"], "reward.step: a table of completions has this column"),
        (["train.reward_weights=[1]"], "reward.<name>.weight"),
        (["rollout.max_repetition=1"], "rollout.max_repetition=1: a fraction from 0 to below 1"),
        (["replay.keep=-1"], "replay.keep=-1: a number of steps, or 0"),
        (["replay.keep=60"], "train.save_total_limit=2 keeps reach 50 steps back; train.save_total_limit=3, or fewer"),
        (
            ["replay.keep=9", "task.images=picture", "task.conversational=true"],
            "replay.keep=9: rollouts with images are not kept; leave it out",
        ),
        (["replay.keep=9", "~callbacks.replay"], "replay.keep=9: callbacks.replay is missing; leave it out"),
        (["+callbacks.mine.function=x.py:f"], "callbacks.mine: needs fn, a callback's class or a function"),
        (["task.environment_id=x"], "task.environment_id=x: there is no task.environment that takes it"),
        (["task.environment_args={a: 1}"], "task.environment_args={'a': 1}: there is no task.environment"),
        (["task.environment=a.B", "task.environment_args=3"], "task.environment_args=3: a mapping"),
        (["train=fp16"], "train.fp16=true: only with CUDA or ROCm"),
        (["+gpu=h100", "train=fp16", "peft=none"], "peft=none: weights in float16 cannot be trained with train.fp16"),
        (["train=async", "generation=vllm_colocate"], "engine.staleness=1: only a server generates while"),
        (["rollout.pass_at_k=1"], "rollout.pass_at_k=1: from 2 to train.num_generations=8 less 1"),
        (["train=maxrl", "rollout.pass_at_k=4"], "rollout.pass_at_k=4: train.loss_type=maxrl divides by"),
        (["reward=[format,concise]"], "reward.concise: task.eval.reward=correctness has to be another reward"),
        (["+reward=concise", "task.eval.reward=concise"], "reward.concise: task.eval.reward=concise has to be another"),
        (["reward.correctness.on_error=ignore"], "reward.correctness.on_error=ignore: unknown; possible: raise, skip"),
        (["reward.correctness.timeout=0"], "reward.correctness.timeout=0: a positive number of seconds"),
        (
            ["+reward.correctness.workers=1.5"],
            "reward.correctness.workers: Value '1.5' of type 'float'",
        ),
        (
            ["+experiment=calculator", "launch.processes=2", "shard=zero3", "train.bf16=true"],
            "task.tools: with ZeRO-3 all processes generate each turn together",
        ),
        (
            ["+experiment=calculator", "launch.processes=2", "generation=vllm_server", "peft=lora"],
            "task.tools: with a vLLM server all processes generate each turn together",
        ),
        (
            [
                "+experiment=calculator",
                "launch.processes=2",
                "shard=fsdp2",
                "generation=vllm_colocate",
                "train.vllm_enable_sleep_mode=true",
            ],
            "task.tools: with train.vllm_enable_sleep_mode=true and FSDP2 all processes generate each turn",
        ),
        (["+reward=judge"], "reward.judge.kwargs.model: needs a value"),
        (["train.gradient_accumulation_steps=0"], "train.gradient_accumulation_steps=0: at least 1"),
        (["train.loss_type=grop"], "did you mean grpo?"),
        (["train.importance_sampling_level=tokens"], "did you mean token?"),
        (["peft=lora", "+peft.lora_alhpa=3"], "did you mean lora_alpha"),
        (["+peft.vision=true"], "peft.vision: of which adapters? Add peft=lora or peft=qlora"),
        (["peft=none", "+peft.r=4"], "peft.r: of which adapters? Add peft=lora or peft=qlora"),
        (["peft=lora", "+peft.target_parameters=experts.w"], "peft.target_parameters=experts.w: a list is needed"),
        (
            ["peft=lora", "peft.lora_dropout=0.1", "+peft.target_parameters=[experts.w]"],
            "peft.target_parameters: PEFT has no peft.lora_dropout of parameters; leave one out",
        ),
        (["task.max_pixels=0"], "task.min_pixels=None task.max_pixels=0: positive"),
        (["engine.share_weights=true"], "engine.share_weights=true: works with generation=vllm_colocate; use auto"),
        (["engine.share_weights=true", "generation=vllm_server"], "works with generation=vllm_colocate; use auto"),
        (["engine.lora=adaptor"], "engine.lora=adaptor: `adapter` or `merged`"),
        (["rollout.max_rounds=0"], "rollout.max_rounds=0: at least 1"),
        (["rollout.completions_at_once=0"], "rollout.completions_at_once=0: at least 1, or null"),
        (
            ["rollout.completions_at_once=8", "generation=vllm_colocate"],
            "rollout.completions_at_once=8: vLLM finds out by itself",
        ),
        (
            [
                "engine.staleness=2",
                "generation=vllm_server",
                "reward=model",
                "reward.model.kwargs.model_name_or_path=x",
            ],
            "engine.staleness=2: reward models and a",
        ),
        (["engine.drafts=eagle", "generation=vllm_colocate"], "engine.drafts=eagle: null or ngram"),
        *(
            (["generation=vllm_colocate", "engine.drafts=ngram", *line], f"engine.drafts=ngram: {message}")
            for line, message in (
                (["generation=vllm_server"], "works with generation=vllm_colocate; a server drafts with a --spec"),
                (["generation=transformers"], "works with generation=vllm_colocate"),
                (["engine.backend=mine.Engine"], "an option of vLLM, and engine.backend=mine.Engine generates"),
                (["+experiment=shapes", "generation=vllm_colocate"], "works with text alone, and the task has images"),
                (["train.vllm_tensor_parallel_size=2"], "each process decides whether they pay, and train.vllm_t"),
                (["train.top_k=9", "train.min_p=0.1"], "vLLM checks no drafts under train.min_p=0.1; leave one"),
                (["+train.generation_kwargs.logit_bias={5: 3.0}"], "vLLM checks no drafts under train.generation_k"),
                (["+gpu=h100", "train.top_p=0.9"], "with train.top_p=0.9 vLLM tells the kept tokens with train.top_k="),
            )
        ),
        (["engine.staleness=-1", "generation=vllm_server"], "engine.staleness=-1: 0, or a number of updates"),
        (["engine.backend=my.Backend"], "engine.backend=my.Backend: it generates with train.use_vllm=true"),
        (["+addons=x"], "addons: no such group"),
        (["+learning_rate=1e-4"], "learning_rate: no such group; did you mean train.learning_rate?"),
        (["train.remove_unused_columns=true"], "rewards and tools need the columns of the data"),
        (["engine.staleness=1", "generation=vllm_colocate"], "engine.staleness=1: only a server generates while"),
        (["engine.staleness=1", "generation=vllm_server", "train.num_iterations=2"], "a generation has to be for one"),
        (
            ["engine.staleness=1", "generation=vllm_server", "+experiment=shapes"],
            "with text alone, and the task has",
        ),
        (
            ["update.max_tokens_per_microbatch=many"],
            "update.max_tokens_per_microbatch=many: `auto`, or a positive number",
        ),
        (["update.max_tokens_per_microbatch=0"], "a positive number"),
        (["update.on_oom=retyr"], "`retry` or `raise`"),
        (["update.max_skipped_steps=0"], "update.max_skipped_steps=0: a positive number of steps"),
        (["generation=vllm_colocate", "train.vllm_mode=colocat"], "train.vllm_mode=colocat: possible: colocate, serv"),
        (["generation=vllm_colocate", "train.vllm_gpu_memory_utilization=5"], "above 0 and at most 1"),
        (["generation=vllm_server", "train.vllm_server_port=80001"], "a port from 1 to 65535"),
        (["generation=vllm_colocate", "train.vllm_max_model_length=87"], "take up to 88 tokens"),
        (["train.temperature=0"], "train.temperature=0: a positive number is needed"),
        (["train.temperature=nan"], "train.temperature=nan: a positive number"),
        (["train.repetition_penalty=0"], "train.repetition_penalty=0: a positive number"),
        (["train.top_k=-1"], "train.top_k=-1: a positive number of tokens, or 0 for no limit"),
        (["train.top_p=1.5"], "train.top_p=1.5: above 0, and 1 for no limit"),
        (["train.learning_rate=-1"], "train.learning_rate=-1: 0 or more"),
        (["train.min_p=2"], "train.min_p=2.0: from 0 to 1, or null"),
        (["train.max_completion_length=0"], "train.max_completion_length=0: at least 1 token"),
        (["train.max_steps=0"], "train.max_steps=0 train.num_train_epochs=1.0: the run would have no step"),
        (["train.max_steps=-1", "train.num_train_epochs=0"], "the run would have no step"),
        (["+train.max_prompt_length=1"], "train.max_prompt_length: no such key; did you mean task.max_prompt_length?"),
        (["+system_prompt=x"], "system_prompt: no such group; did you mean task.system_prompt?"),
        (["plan.hourly_price=-1"], "plan.hourly_price=-1: a positive number is needed, or null"),
        (["+gpu=h100", "gpu.tflops=0"], "gpu.tflops=0: a positive number is needed"),
        (
            ["generation=vllm_colocate", "train.top_p=0.9"],
            "train.top_p=0.9: vLLM tells which tokens this filter kept with train.top_k=",
        ),
        (["generation=vllm_server", "train.repetition_penalty=1.1"], "train.repetition_penalty=1.1: with vLLM"),
        (
            [
                "generation=vllm_colocate",
                "+train.generation_kwargs.top_k=20",
                "train.vllm_importance_sampling_correction=false",
                "train.off_policy_mask_threshold=0.5",
            ],
            "train.generation_kwargs.top_k=20: with vLLM it biases",
        ),
        (["peft=qlora", "generation=vllm_colocate"], "only where it computes in half precision (train.bf16=true model"),
        (
            ["+gpu=h100", "peft=qlora", "generation=vllm_server", "engine.lora=merged"],
            "engine.lora=merged (use engine.lora=adapter), and an adapter cannot be merged into quantized weights",
        ),
        (
            ["+gpu=h100", "peft=qlora", "generation=vllm_colocate", "+peft.quantization.load_in_8bit=true"],
            "vLLM quantizes to nf4 in 4 bits with double quantization, and peft.quantization otherwise",
        ),
    ],
)
def test_what_is_wrong_is_said(composed: Callable[..., DictConfig], overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(composed(*overrides))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_value_of_ones_own_is_taken_where_others_refer_to_it(composed: Callable[..., DictConfig]) -> None:
    for value in ("${rate}", "'${oc.select:rate}'"):
        config = composed("+rate=0.1", f"train.learning_rate={value}")
        check(config)
        assert config.train.learning_rate == 0.1


@pytest.mark.parametrize("option", ["train.save_total_limit=3", "train.save_only_model=true", "train.save_strategy=no"])
def test_steps_are_kept_where_checkpoints_reach_back(composed: Callable[..., DictConfig], option: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.save_total_limit=2 keeps reach 50 steps back"):
        check(composed("replay.keep=60"))
    check(composed("replay.keep=60", option))


def test_the_loss_types_are_those_that_trl_computes() -> None:
    import ast
    import inspect
    import textwrap

    from trl import GRPOTrainer

    tree = ast.parse(textwrap.dedent(inspect.getsource(GRPOTrainer._compute_loss)))
    compared = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "self.loss_type":
            value = ast.literal_eval(node.comparators[0])
            compared |= {value} if isinstance(value, str) else set(value)
    assert set(LOSS_MEANS) == compared


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.optim=adamw_8bits"], "train.optim=adamw_8bits: unknown; did you mean .*adamw_8bit"),
        (["train.fp16=true", "train.bf16=true"], "one of them"),
        (["+gpu=t4", "peft=none"], "peft=none: weights in float16 cannot be trained with train.fp16"),
        (["+gpu=t4", "update.gradients_on_host=true"], "update.gradients_on_host works with one process"),
        (["plan.processes=2", "update.gradients_on_host=true"], "update.gradients_on_host works with one process"),
        (["train.optim=schedule_free_adamw", "update.gradients_on_host=true"], "update.gradients_on_host works with"),
        (["update.activations_on_host=true", "train.gradient_checkpointing=false"], "add train.gradient_ch"),
        *(
            (["generation=vllm_colocate", f"engine.quantization={quantization}", *line], message)
            for quantization, line, message in (
                ("fp4", ["peft=lora"], "engine.quantization=fp4: null, or one of fp8"),
                ("fp8", ["peft=lora", "generation=vllm_server"], "works with generation=vllm_colocate"),
                ("fp8", ["peft=lora", "generation=transformers"], "works with generation=vllm_colocate"),
                ("fp8", ["peft=none"], "all weights are trained; use peft=lora"),
                ("fp8", ["peft=qlora", "model.dtype=bfloat16", "train.bf16=true"], "vLLM quantizes like peft.quant"),
                ("fp8", ["peft=lora", "engine.lora=merged"], "vLLM would get merged weights, engine.lora=merged"),
                ("fp8", ["peft=lora", "train.vllm_enable_sleep_mode=true"], "would get merged weights, a sleeping"),
                ("fp8", ["peft=lora", "train.vllm_importance_sampling_correction=false"], "add train.vllm_importance"),
            )
        ),
        (["update.mlp_tile=0"], "update.mlp_tile=0: a positive number"),
    ],
)
def test_what_cannot_be_trained_together_is_said_before(
    composed: Callable[..., DictConfig], overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(composed(*overrides))


def test_a_batch_is_that_of_all_processes_that_are_planned_for(composed: Callable[..., DictConfig]) -> None:
    small = ["train.per_device_train_batch_size=1", "train.gradient_accumulation_steps=2", "train.num_generations=16"]
    with pytest.raises(ConfigError, match="a batch of 2 completions"):
        check(composed(*small))
    check(composed(*small, "plan.processes=8"))


@pytest.mark.parametrize(
    "overrides",
    [
        ["generation=transformers", "train.top_p=0.9"],
        ["generation=vllm_colocate", "train.top_p=0.9", "train.vllm_importance_sampling_correction=false"],
    ],
)
def test_filters_are_allowed_where_no_importance_ratio_is_biased(
    composed: Callable[..., DictConfig], overrides: list[str]
) -> None:
    config = composed(*overrides)
    assert sampling_filters(config.train) == ["top_p=0.9"]
    check(config)  # raises nothing
    corrected = config.copy()
    corrected.train.use_vllm = corrected.train.vllm_importance_sampling_correction = True
    with pytest.raises(ConfigError, match=r"^train.top_p=0.9: vLLM tells which tokens .* train.top_k= beside it"):
        check(corrected)
    corrected.train.top_k = 64
    check(corrected)
    corrected.train.repetition_penalty = 1.1
    with pytest.raises(ConfigError, match=r"^train.repetition_penalty=1.1: with vLLM it biases the importance ratio"):
        check(corrected)


@pytest.mark.parametrize(
    ("overrides", "vllm", "allowed"),
    [
        (["+gpu=h100", "generation=vllm_colocate"], "0.28.0", True),
        (["+gpu=h100", "generation=vllm_colocate"], None, True),  # a plan for another machine
        (["+gpu=h100", "generation=vllm_colocate"], "0.27.1", False),
        (["+gpu=h100", "generation=vllm_server"], "0.32.0", False),
        (["generation=vllm_colocate"], "0.32.0", False),
        (["generation=vllm_colocate", "engine.backend=mine.Engine"], None, True),
    ],
)
@pytest.mark.parametrize("setting", ["train.top_p=0.9", "train.min_p=0.1"])
def test_a_filter_without_top_k_needs_an_engine_that_tells(
    composed: Callable[..., DictConfig],
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    vllm: str | None,
    allowed: bool,
    setting: str,
) -> None:
    def version(name: str) -> str:
        if vllm is None:
            raise PackageNotFoundError(name)
        return vllm

    monkeypatch.setattr(facts, "version", version)
    config = composed(*overrides, setting)
    if allowed:
        check(config)
    else:
        with pytest.raises(ConfigError, match=r"from vLLM 0\.28 on, colocated on a GPU; otherwise leave it out"):
            check(config)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["+train.generation_kwargs.seed=7"], "all completions of a group would be equal; use train.seed"),
        (["+train.generation_kwargs.n=2"], "use train.num_generations"),
        (["train.temperature=3"], "train.temperature=3: vLLM takes at most 2"),
        (["+train.generation_kwargs.stop=[x]", "train.mask_truncated_completions=true"], "use stop_token_ids"),
        (["+train.generation_kwargs.logit_bias={5:3.0}"], "with vLLM it biases the importance ratio"),
        (["train.vllm_structured_outputs_regex=a+"], "with vLLM it biases the importance ratio"),
    ],
)
def test_what_vllm_cannot_generate_groups_with_is_refused(
    composed: Callable[..., DictConfig], overrides: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        check(composed("generation=vllm_colocate", *overrides))


@pytest.mark.parametrize(
    ("overrides", "filters"),
    [
        ([], []),
        (["train.top_k=20", "train.min_p=0.1"], ["top_k=20", "min_p=0.1"]),
        (["train.top_p=0.9", "+train.generation_kwargs.top_p=1.0"], []),  # what vLLM is given wins
        (["+train.generation_kwargs.temperature=0.1"], ["generation_kwargs.temperature=0.1"]),
        (["+train.generation_kwargs.frequency_penalty=0.5"], ["generation_kwargs.frequency_penalty=0.5"]),
        (["+train.generation_kwargs.min_tokens=8"], ["generation_kwargs.min_tokens=8"]),
        (["+train.generation_kwargs.stop_token_ids=[7]", "+train.generation_kwargs.max_tokens=9"], []),
        (["train.vllm_structured_outputs_regex=a+"], ["vllm_structured_outputs_regex=a+"]),
    ],
)
def test_filters_are_those_that_vllm_is_given(
    composed: Callable[..., DictConfig], overrides: list[str], filters: list[str]
) -> None:
    assert sampling_filters(composed(*overrides).train) == filters


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (["shard=fsdp2"], "train.fsdp: one process has nothing to shard"),
        (["shard=zero3", "launch.processes=2", "train.fsdp=true"], "one of them"),
        (["shard=zero3", "launch.processes=2", "update.mlp_tile=4096"], "update.mlp_tile: under ZeRO-3"),
        (["shard=fsdp2", "launch.processes=2", "train.optim=paged_adamw_8bit"], "bitsandbytes cannot step"),
        (["shard=fsdp2", "launch.processes=2", "train.optim=sgd"], "with an optimizer that keeps no state"),
    ],
)
def test_what_cannot_be_sharded_is_said(composed: Callable[..., DictConfig], line: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        checked(composed(*line), [], loads=False)


def test_deepspeed_has_to_be_installed(composed: Callable[..., DictConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo.config.check.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="DeepSpeed is not installed; `make deepspeed` installs it"):
        check_deepspeed(composed("shard=zero2", "launch.processes=2").train)


def test_a_gpu_profile_takes_an_optimizer_its_sharding_allows(composed: Callable[..., DictConfig]) -> None:
    assert composed("+gpu=h100").train.optim == "adamw_8bit"
    config = composed("+gpu=h100", "shard=fsdp2", "launch.processes=2")
    assert config.train.optim == "adamw_torch"
    check_shard(config)


def test_a_reward_may_be_called_tokens(composed: Callable[..., DictConfig], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def count(completions, **columns):\n    return [1.0 for _ in completions]\n")
    config = composed(f"+reward.tokens.fn={tmp_path}/mine.py:count")
    check(config)
    assert "tokens" in config.reward


@pytest.mark.parametrize(
    ("override", "sharding"),
    [
        ("shard=zero2", "ZeRO-2"),
        ("shard=zero3", "ZeRO-3"),
        ("shard=fsdp2", "FSDP2"),
        ("+train.deepspeed={bf16:{enabled:true}}", None),
        ("train.deepspeed=ds.json", None),
        ("train.deepspeed=null", None),
    ],
)
def test_sharding_follows_from_what_is_configured(
    composed: Callable[..., DictConfig], override: str, sharding: str | None
) -> None:
    assert sharding_strategy(composed(override).train) == sharding


def test_files_and_services_are_looked_for_before_loading(composed: Callable[..., DictConfig], monkeypatch) -> None:
    config = composed("+reward.mine.fn=x.py:f", "train.report_to=wandb")
    check(config)
    with pytest.raises(ConfigError, match=r"reward.mine.fn: there is no file /.*x\.py"):
        check_files_of_rewards(config.reward)
    monkeypatch.setattr("grpo.config.check.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"train\.report_to=wandb: wandb is not installed: pip install"):
        check_report_to(config.train)
