"""Decoder layers by `torch.compile`: the same gradient, compiled once, and what does not compile as it is."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from trl import GRPOTrainer

from grpo.options import LOSS_MEANS, Update
from grpo.trainer import ExactGRPOTrainer, compiled_layers
from grpo.trainer.shared_prompts import attention, merged, varlen
from grpo.trainer.shared_prompts.merged import is_exact
from grpo.trainer.shared_prompts.varlen import segments_of
from grpo.utils.modes import oldest_graph_first
from tests.flash_kernel import Kernel
from tests.stock_trl import make, relative_difference, rollouts, train

SIZES = {"vocab_size": 87, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
EXPERTS = {"num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def policy(family: str, **options: Any) -> Any:
    """A random policy."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SIZES | options)))


def of_all_lengths(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions of 10 to 49 tokens."""
    return rollouts(prompts, trainer, lambda generator: 10 + int(torch.randint(0, 40, (1,), generator=generator)))


def trainer(folder: Path, model: Any, kind: type = ExactGRPOTrainer, **options: Any) -> Any:
    """A trainer that compiles layers, and divides a step into micro-batches of at most 300 tokens."""
    update = {"update": options.pop("update", Update(300, compile=True))} if kind is ExactGRPOTrainer else {}
    options.pop("update", None)
    reward = lambda completion_ids, **columns: [(sum(ids) % 7) / 3 for ids in completion_ids]  # noqa: E731
    sizes = {"max_completion_length": 64, "per_device_train_batch_size": 16, "num_generations": 8, "max_steps": 3}
    return make(
        kind, folder, model=model, rollout_func=of_all_lengths, reward_funcs=reward, **sizes, **update, **options
    )


def differences(folder: Path, model: Callable[[], Any], **options: Any) -> list[float]:
    """Of each step, the difference of the gradient from stock TRL's."""
    theirs = train(trainer(folder, model(), GRPOTrainer, **options))
    ours = train(trainer(folder, model(), **options), start_from=theirs.weights)
    return [relative_difference(own, stock) for own, stock in zip(ours.gradients, theirs.gradients, strict=True)]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stop after PyTorch's tracing, and list what would be compiled."""
    graphs: list[Any] = []

    def noted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(compiled_layers, "BACKEND", noted)
    return graphs


def test_compiled_layers_have_the_gradient_of_stock_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By PyTorch's compiler: LoRA, checkpointing, a KL penalty, long groups, whose attention is an operator."""
    monkeypatch.setattr(attention, "SHORT", 0)
    options = {
        "gradient_checkpointing": True,
        "beta": 0.04,
        "peft_config": LoraConfig(r=4, target_modules="all-linear"),
    }
    assert max(differences(tmp_path, lambda: policy("qwen3"), **options)) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSS_MEANS)
def test_compiled_layers_have_the_gradient_of_each_loss(loss: str, tmp_path: Path) -> None:
    assert max(differences(tmp_path, lambda: policy("llama"), loss_type=loss)) <= 1e-5


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("path", ["of a CPU", "of a GPU"])
def test_layers_are_compiled_once_for_all_lengths(
    path: str, adapter: bool, tmp_path: Path, quick: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SHORT", 0)
    if path == "of a GPU":  # its kernel stands here as its formula
        monkeypatch.setattr(varlen, "aten", Kernel)
        monkeypatch.setattr(merged, "forward_on_cpu", varlen.forward)
        monkeypatch.setattr(merged, "backward_on_cpu", varlen.backward)
        for module in (merged, attention):
            monkeypatch.setattr(module, "layout_on", lambda device, groups: segments_of(groups, device))
    is_exact.cache_clear()
    config = LoraConfig(r=4, target_modules="all-linear") if adapter else None
    ours = trainer(tmp_path, policy("llama"), peft_config=config)
    lengths = []
    backward = ours.step_update._backward

    def noted(model: Any, microbatch: Any, alone: bool) -> Any:
        result = backward(model, microbatch, alone)
        lengths.append((microbatch.part.tokens, len(quick)))
        return result

    ours.step_update._backward = noted
    ours.train()
    assert len({tokens for tokens, _ in lengths}) > 5
    assert {graphs for _, graphs in lengths} == {1}, "one for all layers, also for the trial"
    assert len(ours.compiled.forwards) == SIZES["num_hidden_layers"]
    is_exact.cache_clear()


@pytest.mark.parametrize(
    ("family", "options", "parts", "reason"),
    [
        ("qwen3_moe", EXPERTS, {"self_attn"}, "Qwen3MoeDecoderLayer"),
        ("qwen3_5_text", {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}, {"mlp"}, "as it keeps a state"),
        ("llama", {"num_hidden_layers": 1}, {"self_attn"}, "as a part of it is computed in tiles"),
    ],
)
def test_parts_are_compiled_where_a_layer_is_not(
    family: str, options: dict[str, Any], parts: set[str], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the layer is checkpointed."""
    torch._dynamo.reset()
    update = Update(300, compile=True, mlp_tile=64 if family == "llama" else None)
    theirs = train(trainer(tmp_path, policy(family, **options), GRPOTrainer, gradient_checkpointing=True))
    ours = trainer(tmp_path, policy(family, **options), update=update, gradient_checkpointing=True)
    with caplog.at_level(logging.WARNING), pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_layers, "BACKEND", "aot_eager")
        record = train(ours, start_from=theirs.weights)
    assert max(map(relative_difference, record.gradients, theirs.gradients)) <= 1e-5
    names = {name for name, module in ours.model.named_modules() if module in ours.compiled.forwards}
    norms = {"input_layernorm", "post_attention_layernorm"}
    assert {name.split(".", 3)[3] for name in names if name.startswith("model.layers.0.")} == parts | norms
    assert sum(reason in record.message for record in caplog.records) == 1


def test_a_checkpointed_layer_is_computed_again_by_its_graph() -> None:
    """Of two that fit, PyTorch would take the one that was used last, which may have saved other tensors."""
    used: list[int] = []

    def noted(graph: Any, inputs: Any) -> Any:
        number = max([-1, *used]) + 1
        return lambda *args: (used.append(number), graph.forward(*args))[1]

    torch._dynamo.reset()
    compiled = torch.compile(lambda hidden: hidden.sin().cos(), backend=noted)  # the second length is a variable
    with oldest_graph_first():
        hidden = [torch.ones(length, requires_grad=True) for length in (4, 8)]
        sum(checkpoint(compiled, part, use_reentrant=False).sum() for part in hidden).backward()
    assert used == [0, 1, 1, 0]


def test_layers_that_compile_to_something_else_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(graph: Any, inputs: Any) -> Any:
        return lambda *args: tuple(1.01 * output for output in graph.forward(*args))

    torch._dynamo.reset()
    monkeypatch.setattr(compiled_layers, "BACKEND", wrong)
    ours = trainer(tmp_path, policy("llama"))
    with caplog.at_level(logging.WARNING):
        ours.train()
    assert ours.compiled.forwards == {}
    assert "LlamaDecoderLayer: not compiled, as its results differ by 1.0e-02" in caplog.text


@pytest.mark.parametrize("in_update", [True, False])
def test_what_a_compiled_layer_fails_in_is_repeated(
    in_update: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without it, a step or the scoring of its rollouts, and in no smaller micro-batches than before."""
    calls = iter(range(12 * in_update))  # the trial has fewer

    def fails_later(graph: Any, inputs: Any) -> Any:
        def forward(*args: Any) -> Any:
            if torch.is_grad_enabled() == in_update and next(calls, None) is None:
                raise RuntimeError("a kernel that fails")
            return graph.forward(*args)

        return forward

    torch._dynamo.reset()
    monkeypatch.setattr(compiled_layers, "BACKEND", fails_later)
    theirs = train(trainer(tmp_path, policy("llama"), GRPOTrainer, num_iterations=2))
    ours = trainer(tmp_path, policy("llama"), num_iterations=2)
    with caplog.at_level(logging.WARNING):
        record = train(ours, start_from=theirs.weights)
    assert max(map(relative_difference, record.gradients, theirs.gradients)) <= 1e-5
    assert ours.compiled.forwards == {}
    assert caplog.text.count("compiled layers failed, and compute as they are from now on: RuntimeError: a kernel") == 1
    assert {log["update/max_tokens_per_microbatch"] for log in record.logs} == {300}
    assert {log["update/oom_retries"] for log in record.logs} == {0}


def test_a_gpu_compiles_and_a_cpu_does_if_asked(tmp_path: Path) -> None:
    assert trainer(tmp_path, policy("llama"), update=Update(300)).compiled is None
    assert trainer(tmp_path, policy("llama"), update=Update(300, compile=True)).compiled is not None
    with pytest.raises(ValueError, match=r"update\.compile=yes"):
        Update(compile="yes")
    with pytest.raises(ValueError, match=r"train\.torch_compile=true"):
        trainer(tmp_path, policy("llama"), torch_compile=True)


def test_a_trial_with_dropout_draws_no_random_numbers(tmp_path: Path, quick: list[Any]) -> None:
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5)
    ours = trainer(tmp_path, policy("llama"), peft_config=config)
    before = torch.get_rng_state()
    with ours.compiled.on(ours.model):
        assert torch.equal(torch.get_rng_state(), before)
    assert len(ours.compiled.forwards) == SIZES["num_hidden_layers"]
