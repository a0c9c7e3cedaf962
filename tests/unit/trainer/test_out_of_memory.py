"""An update, its log-probabilities and its generation after an OOM."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo.generation.transformers import continuous_batching
from grpo.generation.transformers.growing_cache import CACHE
from grpo.trainer import DoesNotFit, Update
from tests.stock_trl import Record, doubled, ours, relative_difference, train

UpdateValues = tuple[int, bool, bool]


class OutOfMemory:
    """Raises as a GPU does, at certain calls."""

    def __init__(self, *calls: int) -> None:
        self.calls, self.count, self.raised = calls, 0, 0

    def __call__(self, *args: Any) -> None:
        self.count += 1
        if self.count in self.calls:
            self.raised += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@functools.cache
def untouched_by_oom(update: UpdateValues) -> Record:
    """A training in which memory does not run out."""
    with tempfile.TemporaryDirectory() as folder:
        return train(ours(Path(folder), Update(*update), loss_type="grpo"))


@pytest.mark.parametrize(("budget", "passes"), [(100, (1,)), (100, (3,)), (100, (6,)), (400, (1, 2, 3)), (100, (1, 4))])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("share", [False, True])
def test_the_gradient_is_the_same_after_memory_ran_out(
    tmp_path: Path, where: str, budget: int, passes: tuple[int, ...], share: bool
) -> None:
    budget = budget // 3 if share else budget  # several micro-batches all the same
    update = (budget, False, share)  # tokens, no completion skipped, prompts shared
    untouched = untouched_by_oom(update)
    assert (
        share or budget > 100 or untouched.logs[0]["update/microbatches"] == 6
    )  # so 1, 3, 6 are first, middle and last
    trainer = ours(tmp_path, Update(*update), loss_type="grpo")
    assert trainer.packing.shared_prompts.applies({}) == share  # the trial is over before memory runs out
    fault = OutOfMemory(*passes)
    layer = trainer.model.model.layers[0]
    if where == "forward":
        layer.register_forward_pre_hook(fault)
    else:
        layer.register_full_backward_pre_hook(fault)
    faulty = train(trainer)
    assert fault.raised == len(passes)
    assert sum(row["update/oom_retries"] for row in faulty.logs) == len(passes)
    assert faulty.logs[1]["update/max_tokens_per_microbatch"] <= budget / 2 ** len(passes)
    for mine, stock in zip(faulty.gradients, untouched.gradients, strict=True):
        assert relative_difference(mine, stock) <= 1e-5


@pytest.mark.parametrize("passes", [(1,), (2, 3)])
def test_the_gradient_is_the_same_after_an_oom_in_scoring(tmp_path: Path, passes: tuple[int, ...]) -> None:
    options = {"beta": 0.04, "num_iterations": 2}
    untouched = train(doubled(ours(tmp_path, Update(400, share_prompts=False), **options)))
    trainer = doubled(ours(tmp_path, Update(400, share_prompts=False), **options))
    fault = OutOfMemory(*passes)
    trainer.ref_model.model.layers[0].register_forward_pre_hook(fault)
    faulty = train(trainer)
    assert fault.raised == len(passes)
    assert faulty.logs[0]["update/oom_retries"] == len(passes)
    for mine, stock in zip(faulty.gradients, untouched.gradients, strict=True):
        assert relative_difference(mine, stock) <= 1e-5


def test_adaptive_entropy_counts_once_when_a_step_is_repeated(tmp_path: Path) -> None:
    options = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 5.0, "max_steps": 1}
    measured = []
    for calls in ((), (3,)):
        trainer = ours(tmp_path, **options)
        trainer.model.model.layers[0].register_full_backward_pre_hook(OutOfMemory(*calls))
        record = train(trainer)
        measured.append((trainer._last_world_entropy, record.logs[0]["entropy_coef"]))
        assert record.logs[0]["update/oom_retries"] == len(calls)
    assert measured[1] == pytest.approx(measured[0], rel=1e-6)
    assert measured[0][1] > 0.01


def test_a_row_that_does_not_fit_alone_ends_the_run_with_advice(tmp_path: Path) -> None:
    trainer = ours(tmp_path)
    trainer.packing.shared_prompts.decide()
    trainer.model.model.layers[0].register_forward_pre_hook(OutOfMemory(*range(1, 1000)))
    with pytest.raises(
        DoesNotFit, match=r"single sequence of \d+ prompt and \d+ completion tokens.*max_completion_length"
    ):
        trainer.train()


def test_a_loss_that_cannot_be_divided_gives_advice_after_an_oom(tmp_path: Path) -> None:
    trainer = ours(tmp_path, top_entropy_quantile=0.2)
    trainer.model.model.layers[0].register_forward_pre_hook(OutOfMemory(1))
    with pytest.raises(DoesNotFit, match="lower per_device_train_batch_size and raise gradient_accumulation_steps"):
        trainer.train()


def test_on_oom_raise_leaves_the_error_to_the_caller(tmp_path: Path) -> None:
    trainer = ours(tmp_path, Update(on_oom="raise", share_prompts=False))
    trainer.packing.shared_prompts.decide()
    trainer.model.model.layers[0].register_forward_pre_hook(OutOfMemory(1))
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()


def test_other_errors_are_not_taken_for_lack_of_memory(tmp_path: Path) -> None:
    trainer = ours(tmp_path)

    def broken(*args: Any) -> None:
        raise RuntimeError("shapes cannot be multiplied")

    trainer.model.model.layers[0].register_forward_pre_hook(broken)
    with pytest.raises(ValueError, match=r"log-probabilities of LlamaForCausalLM: .*shapes cannot be multiplied"):
        trainer.train()


def test_auto_first_tries_the_longest_row_without_a_gradient(tmp_path: Path) -> None:
    untouched = train(ours(tmp_path, beta=0.04))
    trainer = ours(tmp_path, beta=0.04)
    trainer.packing.shared_prompts.decide()
    trainer.budget.begun = False  # as `auto` on a GPU
    lengths = []
    trainer.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    faulty = train(trainer)
    prompts = trainer.processing_class(list(trainer.train_dataset["prompt"]))["input_ids"]
    assert lengths[0][0] == 1
    assert lengths[0][1] - trainer.max_completion_length in {len(ids) for ids in prompts}
    assert lengths[0][1] >= max(shape[1] for shape in lengths)
    assert faulty.logs[0]["update/max_tokens_per_microbatch"] == lengths[0][1]
    for mine, stock in zip(faulty.gradients, untouched.gradients, strict=True):
        assert relative_difference(mine, stock) <= 1e-5


@pytest.mark.parametrize(
    "options",
    [{"num_iterations": 2}, {"beta": 0.04, "length": lambda generator: 1}],
    ids=["two iterations", "completions of one token"],
)
def test_the_step_after_the_trial_survives_lack_of_memory(tmp_path: Path, options: dict[str, Any]) -> None:
    untouched = train(ours(tmp_path, **options))
    trainer = ours(tmp_path, **options)
    trainer.budget.begun = False
    trainer.model.model.layers[0].register_full_backward_pre_hook(OutOfMemory(2))
    faulty = train(trainer)
    assert faulty.logs[0]["update/oom_retries"] == 1
    for mine, stock in zip(faulty.gradients, untouched.gradients, strict=True):
        assert relative_difference(mine, stock) <= 1e-5


def test_generation_that_does_not_fit_is_split_between_prompts(tmp_path: Path) -> None:
    options = {"rollout_func": None, "top_k": 1, "gradient_checkpointing": True}
    completions: dict[str, list[str]] = {}
    for name, limit in (("whole", 99), ("split", 4)):
        trainer = ours(tmp_path, **options)

        def within_memory(module: Any, args: Any, given: Any, limit: int = limit) -> None:
            if not torch.is_grad_enabled() and given.get(CACHE) and len(given["input_ids"]) > limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        trainer.model.register_forward_pre_hook(within_memory, with_kwargs=True)
        record = train(trainer)
        completions[name] = list(trainer._logs["completion"])
    assert completions["whole"] == completions["split"]
    assert [row["update/oom_retries"] for row in record.logs] == [2, 0]
    assert trainer.rollouts.completer.batching.limit == 4
    assert trainer.model.is_gradient_checkpointing


def test_a_completion_too_large_to_generate_ends_with_advice(tmp_path: Path) -> None:
    trainer = ours(tmp_path, rollout_func=None)
    fault = OutOfMemory(*range(1, 100))
    trainer.model.generate = lambda **inputs: fault()
    with pytest.raises(DoesNotFit, match=r"a completion does not fit .* generated: lower max_completion_length"):
        trainer.train()


@pytest.mark.parametrize("passes", [(1,), (2,), (5,)])
def test_an_oom_in_a_trial_decides_nothing_about_a_policy(tmp_path: Path, passes: tuple[int, ...]) -> None:
    trainer = ours(tmp_path, Update(400))
    fault = OutOfMemory(*passes)
    trainer.model.model.layers[0].register_forward_pre_hook(fault)
    trainer.packing.shared_prompts.decide()
    prompts = [[3, 4], [3, 4]]
    trainer.rollouts.completer.batching.complete(
        trainer.model,
        [0, 0],
        lambda rows: {"input_ids": torch.tensor([prompts[row] for row in rows])},
        ("input_ids",),
        {"generation_config": trainer.generation_config},
        "",
    )
    assert fault.raised == 1
    assert trainer.packing.shared_prompts.results == {"padding": False, "text": True}
    trials = trainer.rollouts.completer.batching._trials
    assert trials == {continuous_batching.ANEW: None, continuous_batching.COPIED: None}
