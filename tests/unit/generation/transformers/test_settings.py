"""One policy in rollouts, evaluations and conversations: prompt, end and sampling."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo.generation.transformers.completer import Completer
from grpo.generation.transformers.continuous_batch import ContinuousBatch, why_not_shared
from grpo.generation.transformers.continuous_batching import ContinuousBatching, each_alone, first_equal
from grpo.generation.transformers.settings import decoding, ends_of, only, settings_of
from grpo.generation.transformers.trial import why_not_joined
from tests.stock_trl import ours, tiny_llama, train

SIZES = {"hidden_size": 64, "vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NAMES = ("input_ids", "attention_mask")
OTHERS = {"typical_p": 0.2, "no_repeat_ngram_size": 2, "min_p": 0.5, "repetition_penalty": 3.0, "top_k": 3}
"""What a model's `generation_config.json` may have, and stock TRL takes over where it has None."""


def policy(family: str = "llama", **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = AutoConfig.for_model(family, **SIZES, **sizes, initializer_range=0.3, **options)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def inputs_of(places: list[int]) -> dict[str, torch.Tensor]:
    """Prompts of five tokens, two completions each."""
    ids = torch.tensor([[3 + place // 2, 4, 5, 6, 7] for place in places])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def completed(model: Any, how: dict[str, Any], limit: int | None = None) -> list[list[int]]:
    same = first_equal([place // 2 for place in range(8)])
    return ContinuousBatching(limit).complete(model, same, inputs_of, NAMES, how, "", group=2)


def test_a_models_own_generation_config_acts_on_nothing() -> None:
    model, how = policy(), {"do_sample": False, "max_new_tokens": 12}
    plain = completed(model, how)
    before = model.generation_config
    model.generation_config.update(**OTHERS)
    assert each_alone(model, inputs_of(list(range(8))), how) == completed(model, how) == plain
    assert model.generation_config is before
    asked = completed(model, how | {"repetition_penalty": 3.0})
    assert asked != plain, "what is asked for acts"


@pytest.mark.parametrize("engine", ["rollouts", "evaluation"])
def test_rollouts_and_evaluations_end_and_sample_alike(engine: str, tmp_path: Path) -> None:
    """The tokenizer's end is not among the model's, which transformers adds when training begins."""
    trainer = ours(tmp_path, rollout_func=None, max_completion_length=8)
    trainer.model.generation_config.update(eos_token_id=50, **OTHERS)
    tokenizer = trainer.processing_class
    if engine == "rollouts":
        config = trainer.generation_config
    else:
        config = decoding(trainer.model, tokenizer, 8, temperature=1.0)["generation_config"]
    with only(trainer.model, config):
        used, _ = trainer.model._prepare_generation_config(config)
    assert tokenizer.eos_token_id in used.eos_token_id
    assert not used.top_k
    assert not any(getattr(used, name) for name in ("no_repeat_ngram_size", "min_p"))
    assert used.typical_p in (None, 1.0)
    assert used.repetition_penalty in (None, 1.0)


@pytest.mark.parametrize(("own", "ends"), [(None, [1]), (50, [1, 50]), ([50, 1], [50, 1])])
def test_completions_end_with_the_ends_of_model_and_tokenizer(own: Any, ends: list[int]) -> None:
    model = SimpleNamespace(generation_config=GenerationConfig(eos_token_id=own))
    assert ends_of(model, SimpleNamespace(eos_token_id=1)) == ends


def test_arguments_of_the_template_are_in_every_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = AutoTokenizer.from_pretrained("grpo/builtin/tiny")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if thinks is false %} 0 0 0{% endif %}"
    )
    model = AutoModelForCausalLM.from_pretrained("grpo/builtin/tiny", dtype=torch.float32).eval()
    lengths: list[int] = []
    model.register_forward_pre_hook(
        lambda module, args, given: lengths.append(given["input_ids"].size(1)), with_kwargs=True
    )
    for template in ({}, {"thinks": False}):
        completer = Completer(model, tokenizer, 2, template)
        monkeypatch.setattr(completer.batching, "_batch", lambda *_: None)  # no trials, whose prompts are others
        completer([[{"role": "user", "content": "How many ?"}]])
    assert max(lengths) == lengths[0] + 3


def test_a_policys_own_generate_is_asked() -> None:
    model, asked = policy(), list[int]()
    generate = model.generate

    def own(input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        asked.append(len(input_ids))
        return generate(input_ids=input_ids, **options)

    model.generate = own
    how = {"do_sample": False, "max_new_tokens": 4}
    assert "generate" in str(why_not_shared(model, NAMES))
    assert completed(model, how) == each_alone(model, inputs_of(list(range(8))), how)
    assert asked == [8, 8]


@pytest.mark.parametrize("family", ["bloom", "llama"])
def test_a_completion_joins_where_positions_come_from_the_mask(family: str) -> None:
    model = policy(family, **({"n_layer": 2, "n_head": 4} if family == "bloom" else {}))
    how = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": list(range(2, 40))}
    assert why_not_joined(model, ContinuousBatch()) is None
    assert completed(model, how, limit=2) == each_alone(model, inputs_of(list(range(8))), how)


def test_a_policy_that_reads_the_whole_batch_does_not_join() -> None:
    """As one whose positions count from the left of the batch, padding included."""
    model = policy("gpt2", n_layer=2, n_head=4, n_embd=64, n_positions=64)
    forward = model.forward
    model.forward = lambda *args, position_ids=None, **options: forward(*args, **options)
    assert "logits differ" in str(why_not_joined(model, ContinuousBatch()))


@pytest.mark.parametrize("name", [None, "dynamic", "hybrid", "static"])
def test_each_implementation_of_a_cache_generates(name: str | None) -> None:
    model = policy()
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=5,
        eos_token_id=2,
        pad_token_id=0,
        cache_implementation=name,
        disable_compile=True,
    )
    plain = completed(model, {"do_sample": False, "max_new_tokens": 5})
    assert completed(model, {"generation_config": config}) == plain
    settings = settings_of(model, {"generation_config": config})["generation_config"]
    assert (why_not_shared(model, NAMES, settings) is None) == (name in (None, "dynamic"))


def test_rollouts_are_made_without_dropout(tmp_path: Path) -> None:
    """TRL's would have it; it stays in the update."""
    trainer = ours(tmp_path, rollout_func=None, max_completion_length=4, max_steps=1, model=tiny_llama())
    layer, modes = trainer.model.model.layers[0].mlp, set[tuple[bool, bool]]()
    layer.register_forward_pre_hook(lambda module, args: modes.add((module.training, torch.is_grad_enabled())))
    train(trainer)
    assert modes == {(False, False), (True, True)}
