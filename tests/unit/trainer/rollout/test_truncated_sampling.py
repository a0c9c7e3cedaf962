"""Importance ratios under top-k, top-p and min-p, by enumeration of all that an engine can draw."""

import functools
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForCausalLM

from grpo.generation.backend import Backend
from grpo.generation.kept_tokens import KeptLogprob
from grpo.options import Engine
from grpo.trainer.rollout import truncated_sampling
from grpo.trainer.rollout.truncated_sampling import over
from grpo.utils.errors import GenerationError
from tests.stock_trl import compare_engine_at, ours, tiny_llama

VOCABULARY = 20
FILTERS: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 4},
    "top-p": {"top_k": 19, "top_p": 0.7},
    "min-p": {"top_k": 19, "min_p": 0.15},
    "all three": {"top_k": 5, "top_p": 0.8, "min_p": 0.05},
    "top-p alone": {"top_p": 0.7},
    "min-p alone": {"min_p": 0.15},
    "nothing filtered": {"top_k": VOCABULARY},
}


def kept(logps: torch.Tensor, top_k: int = VOCABULARY, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    """The tokens that a filter leaves of a distribution, as vLLM applies them: min-p, then top-k, then top-p."""
    probability = logps.exp()
    order = logps.argsort(descending=True).tolist()
    order = [token for token in order if probability[token] >= min_p * probability.max()][:top_k]
    left = probability[order] / probability[order].sum()
    return [token for token, before in zip(order, (left.cumsum(0) - left).tolist(), strict=True) if before < top_p]


class Everything(Backend):
    """Returns each completion of two tokens that a filter leaves of another policy, and then the first one again."""

    tells = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.other = LlamaForCausalLM.from_pretrained(tiny_llama(VOCABULARY))
        generator = torch.Generator().manual_seed(1)
        for weight in self.other.parameters():
            weight.data += 0.03 * torch.randn(weight.shape, generator=generator)
        self.filter = {name: options[name] for name in ("top_k", "top_p", "min_p") if options[name]}
        self.after = functools.cache(self.after)  # type: ignore[method-assign]  # its policy does not change

    def sync_weights(self) -> None:
        pass

    @torch.no_grad()
    def after(self, *tokens: int) -> dict[int, KeptLogprob]:
        """The tokens that the filter leaves, and their log-probabilities over them."""
        logps = self.other(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        left = kept(logps, **self.filter)
        over_left = logps[left].log_softmax(0).tolist()
        return {token: KeptLogprob(value, left) for token, value in zip(left, over_left, strict=True)}

    def generate(self, prompts: list, *args: Any, **options: Any) -> tuple:
        found = [
            ([one, two], [[first], [second]])
            for one, first in self.after(*prompts[0]).items()
            for two, second in self.after(*prompts[0], one).items()
        ]
        assert len(found) <= len(prompts)
        completions, logps = zip(*itertools.islice(itertools.cycle(found), len(prompts)), strict=True)
        if not self.tells:
            logps = [[[float(value)] for (value,) in row] for row in logps]
        self.drawn = len(found)
        return prompts, list(map(list, completions)), list(logps), None


class Silent(Everything):
    tells = False


class Tied(Everything):
    """More tokens than it was asked for may have been kept where it has drawn the second one."""

    def generate(self, *args: Any, **options: Any) -> tuple:
        prompts, completions, logps, nothing = super().generate(*args, **options)
        return prompts, completions, [[first, [None]] for first, _ in logps], nothing


def trainer_of(folder: Path, backend: type[Backend], filters: dict[str, Any], **options: Any) -> Any:
    """A trainer whose generation is all that an engine with another policy can draw."""
    trainer = ours(
        folder,
        engine=Engine(lora="merged", backend=f"{__name__}.{backend.__name__}"),
        model=tiny_llama(VOCABULARY),
        train_dataset=Dataset.from_list([{"prompt": "12"}]),
        use_vllm=True,
        rollout_func=None,
        reward_funcs=lambda completion_ids, **columns: [float(ids[0] % 3 + ids[1] % 2) for ids in completion_ids],
        num_generations=VOCABULARY**2,
        per_device_train_batch_size=VOCABULARY**2,
        max_completion_length=2,
        loss_type="dr_grpo",
        vllm_importance_sampling_clip_max=1e9,
        **{"vllm_importance_sampling_mode": "sequence_truncate"} | filters | options,
    )
    compare_engine_at(trainer, math.inf)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # as in the loop of transformers
    return trainer


def rollouts_of(trainer: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Rollouts, the probability with which the engine draws each, and the completions' logits of all tokens."""
    batch = trainer._generate_and_score_completions([trainer.train_dataset[0]] * VOCABULARY**2)
    engine, drawn = trainer.vllm_generation, torch.zeros(VOCABULARY**2)
    prompt = batch["prompt_ids"][0].tolist()
    for row, (one, two) in enumerate(batch["completion_ids"][: engine.drawn].tolist()):
        drawn[row] = math.exp(engine.after(*prompt)[one] + engine.after(*prompt, one)[two])
    ids = torch.cat((batch["prompt_ids"], batch["completion_ids"]), 1)
    return batch, drawn, trainer.model(ids).logits[:, -3:-1].log_softmax(-1)


def filtered(trainer: Any, batch: Any, logps: torch.Tensor) -> torch.Tensor:
    """The policy's probability of each completion under the engine's filter."""
    prompt, engine, found = batch["prompt_ids"][0].tolist(), trainer.vllm_generation, []
    for row, (one, two) in enumerate(batch["completion_ids"].tolist()):
        left = (list(engine.after(*prompt)), list(engine.after(*prompt, one)))
        over = [logps[row, place, tokens].logsumexp(0) for place, tokens in enumerate(left)]
        found.append((logps[row, 0, one] + logps[row, 1, two] - sum(over)).exp())
    return torch.stack(found)


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_the_gradient_is_that_of_the_policy_under_the_filter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filters: dict[str, Any]
) -> None:
    monkeypatch.setattr(truncated_sampling, "WIDTHS", (2, 5))  # fewer than some that are kept
    trainer = trainer_of(tmp_path, Everything, filters)
    batch, drawn, logps = rollouts_of(trainer)
    policy = filtered(trainer, batch, logps).detach()
    ratio = batch["importance_sampling_ratio"][:, 0]
    there = drawn > 0
    assert float(drawn.sum()) == pytest.approx(1, abs=1e-5)
    assert (ratio.max() / ratio.min()) > 1.5
    torch.testing.assert_close(ratio[there], (policy / drawn)[there], rtol=1e-4, atol=0)
    assert float((drawn * ratio).sum()) == pytest.approx(1, abs=1e-4)  # without the filter's correction less

    advantages = torch.tensor([float(one % 3 + two % 2) - 1 for one, two in batch["completion_ids"].tolist()])
    batch["advantages"] = advantages * drawn * len(drawn)  # as if each had been drawn as often as it is
    trainer.compute_loss(trainer.model, batch).backward()
    gradients = [weight.grad for weight in trainer.model.parameters()]
    of_tokens = logps.gather(2, batch["completion_ids"][..., None])[..., 0].sum(1)
    if filters.get("top_k") == VOCABULARY:  # the gradient of the expected advantage
        expected = -(of_tokens.exp() * advantages).sum() / 2
    else:
        expected = -(policy * advantages * of_tokens)[there].sum() / 2
    for found, wanted in zip(gradients, torch.autograd.grad(expected, list(trainer.model.parameters())), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-6)


def test_all_else_is_of_all_tokens(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Everything, FILTERS["all three"], beta=0.1)
    batch, drawn, logps = rollouts_of(trainer)
    of_tokens = logps.detach().gather(2, batch["completion_ids"][..., None])[..., 0]
    torch.testing.assert_close(batch["old_per_token_logps"], of_tokens, rtol=0, atol=1e-4)
    torch.testing.assert_close(batch["ref_per_token_logps"], of_tokens, rtol=0, atol=1e-4)
    there = drawn > 0
    mass = of_tokens.sum(1).exp() / filtered(trainer, batch, logps).detach()
    over_all = batch["sampling_per_token_logps"].sum(1).exp()
    torch.testing.assert_close(over_all[there], (drawn * mass)[there], rtol=1e-3, atol=0)
    (kept_mass,) = trainer._metrics["train"]["sampling/kept_mass"]
    assert 0.2 < kept_mass < 0.99


def test_a_ratio_is_1_where_what_was_kept_is_unknown(tmp_path: Path) -> None:
    token = {"vllm_importance_sampling_mode": "token_truncate"}
    trainer = trainer_of(tmp_path, Tied, FILTERS["all three"], **token)
    batch, _, logps = rollouts_of(trainer)
    first, second = batch["importance_sampling_ratio"].unbind(1)
    assert first.unique().numel() > 1
    assert second.unique().tolist() == [1]
    of_tokens = logps.detach().gather(2, batch["completion_ids"][..., None])[..., 0]
    torch.testing.assert_close(batch["old_per_token_logps"], of_tokens, rtol=0, atol=1e-4)


def test_an_engine_that_does_not_say_what_it_kept_is_an_error(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, Silent, FILTERS["top-k"])
    with pytest.raises(GenerationError, match="the engine does not tell which tokens a sampling filter kept"):
        rollouts_of(trainer)


@pytest.mark.parametrize(
    ("filters", "problem"),
    [
        ({"top_k": 4, "repetition_penalty": 1.1}, "train.repetition_penalty=1.1: with vLLM it biases"),
        ({"top_k": 4, "generation_kwargs": {"top_p": 0.9}}, "train.generation_kwargs.top_p=0.9: with vLLM it biases"),
    ],
)
def test_a_filter_that_cannot_be_corrected_is_refused(tmp_path: Path, filters: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        trainer_of(tmp_path, Everything, filters)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (5.0, 1.0), (5.0, 0.5)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_tokens_are_scored_over_those_that_were_kept(
    temperature: float, softcap: float | None, scale: float, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(6, 8, generator=generator), torch.randn(VOCABULARY, 8, generator=generator)
    bias = torch.randn(VOCABULARY, generator=generator) if has_bias else None
    kept = torch.tensor([[0, 1, 2], [3, 4, -1], [5, -1, -1], [6, 7, 8], [9, 10, 19], [0, 19, -1]])
    targets = torch.tensor([2, 3, 5, 6, 19, 0])
    logits = hidden @ weight.T * scale if bias is None else (hidden @ weight.T + bias) * scale
    logits = (logits if softcap is None else softcap * (logits / softcap).tanh()) / temperature
    expected = torch.stack(
        [
            logits[row, target] - logits[row, kept[row][kept[row] >= 0]].logsumexp(0)
            for row, target in enumerate(targets)
        ]
    )
    found = over(hidden, kept, targets, weight, bias, temperature, softcap, scale)
    torch.testing.assert_close(found, expected)
