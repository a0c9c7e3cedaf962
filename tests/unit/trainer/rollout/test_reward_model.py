"""Reward models in the trainer, beside TRL's own use of one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForSequenceClassification
from trl import GRPOTrainer

from grpo.config.schema import ROOT
from grpo.options import Update
from grpo.trainer.measurements import MemoryReadings
from grpo.trainer.rollout.reward_model import MicrobatchedRewardModel
from grpo.trainer.token_budget import TokenBudget
from grpo.utils.errors import DoesNotFit
from rewards.model import model
from rewards.scorer import load
from tests.stock_trl import LONGEST, make, ours, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random reward model with the tokenizer of the built-in policy."""
    folder = tmp_path_factory.mktemp("scorer") / "scorer"
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "grpo" / "builtin" / "tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=1,
        initializer_range=0.3,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def scored(trainer: Any) -> list[float]:
    train(trainer)
    (values,) = trainer._logs["rewards"].values()
    return list(values)


def test_its_scores_are_stock_trls_in_micro_batches_too(tmp_path: Path, folder: Path) -> None:
    theirs = scored(make(GRPOTrainer, tmp_path, reward_funcs=str(folder), max_steps=1))
    scorer, tokenizer = load(str(folder), "float32")
    small = Update(max_tokens_per_microbatch=60)
    trainer = ours(tmp_path, small, reward_funcs=[scorer], reward_processing_classes=[tokenizer], max_steps=1)
    sizes = []
    scorer.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    assert scored(trainer) == pytest.approx(theirs, abs=1e-5)
    assert len(sizes) > 2
    assert all(rows == 1 or rows * width <= 60 for rows, width in sizes)
    assert trainer.memory.highest["memory/reward_gb"] > 0


def test_the_function_scores_a_conversation_by_its_chat_template(folder: Path) -> None:
    scorer, tokenizer = load(str(folder), "float32")
    prompt, answer = [{"role": "user", "content": "2 plus 2"}], [{"role": "assistant", "content": "4"}]
    ids = tokenizer("2 plus 2\n4\n", return_tensors="pt")["input_ids"]
    expected = scorer(input_ids=ids).logits[0, 0].item()
    assert model([prompt], [answer], str(folder), "float32") == pytest.approx([expected])
    assert model(["2 plus 2\n"], ["4\n"], str(folder), "float32") == pytest.approx([expected])


class Hungry(torch.nn.Module):
    """Scores a sequence by its length, and has memory for so many tokens at once."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        if input_ids.numel() > self.most:
            raise torch.OutOfMemoryError
        return SimpleNamespace(logits=attention_mask.sum(1, keepdim=True))


def reward_model(scorer: Hungry, **options: Any) -> MicrobatchedRewardModel:
    budget = TokenBudget(1000, torch.device("cpu"))
    return MicrobatchedRewardModel(scorer, budget, MemoryReadings(on_gpu=False), **options)


def test_after_an_oom_it_scores_fewer_at_once() -> None:
    mask = torch.tensor([[1] * length + [0] * (LONGEST - length) for length in (3, 20, 7, 24, 1)])
    scorer = reward_model(Hungry(most=30))
    assert scorer(input_ids=mask, attention_mask=mask).logits[:, 0].tolist() == [3, 20, 7, 24, 1]
    assert scorer.budget.retries > 0
    with pytest.raises(DoesNotFit, match="does not score a sequence of 24 tokens"):
        reward_model(Hungry(most=10))(input_ids=mask, attention_mask=mask)


def test_with_sharded_weights_all_processes_make_as_many_passes() -> None:
    sizes, cpu = list[int](), torch.device("cpu")
    two = SimpleNamespace(device=cpu, gather=lambda number: torch.cat((number, torch.tensor([7]))))
    mask = torch.tensor([[1] * length + [0] * (LONGEST - length) for length in (3, 20, 7, 24, 1)])
    scorer = Hungry(most=1000)
    scorer.register_forward_pre_hook(lambda *args, **kwargs: sizes.append(1), with_kwargs=True)
    logits = reward_model(scorer, accelerator=two, sharded=True)(input_ids=mask, attention_mask=mask).logits
    assert logits[:, 0].tolist() == [3, 20, 7, 24, 1]
    assert len(sizes) == 7


def test_what_is_no_reward_model_is_explained(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"not a reward model: its files lack score\.weight"):
        load(str(ROOT / "grpo" / "builtin" / "tiny"))
    with pytest.raises(ValueError, match="float23"):
        load(str(folder), "float23")
    assert AutoModelForSequenceClassification.from_pretrained(folder).config.num_labels == 1
