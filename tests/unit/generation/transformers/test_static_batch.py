"""Completions whose steps are recorded, against `generate`; the driver's graphs are those of `tests.cuda_graph`."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig

from grpo.generation.transformers import continuous_batching, static_batch
from grpo.generation.transformers.completer import encode
from grpo.generation.transformers.continuous_batching import ContinuousBatching, each_alone, first_equal
from grpo.generation.transformers.static_batch import StaticBatch, why_not_static
from grpo.generation.transformers.trial import why_not_joined
from grpo.view.images import prompt_of
from tests.cuda_graph import Graph
from tests.unit.generation.transformers.test_continuous_batching import (
    FAMILIES,
    GROUP,
    HOW,
    TURNS,
    VISION_FAMILIES,
    WITH_STATE,
    assert_drawn_by_probabilities,
    complete,
    ends_of,
    make_policy,
    make_processor,
    padded,
    policy,
    prompts,
)
from tests.vision_policies import problems

NAMES = ("input_ids", "attention_mask")
NOT_RECORDED = {
    "gemma2": "its attention limits the scores",
    "kimi_linear": "Q/K/V should have the same head size",
    "zamba2": "no attribute 'prompt_keys'",
}
"""Why; keys and values of other sizes are a limit of the kernel of CPUs."""


@pytest.fixture(autouse=True)
def _recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuous_batching, "RECORDING", ("cpu",))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(Graph, "recorded", 0)
    monkeypatch.setattr(Graph, "replayed", 0)
    monkeypatch.setattr(static_batch, "drawn", lambda scores: torch.multinomial(scores.softmax(-1), 1))  # as on a GPU
    monkeypatch.setattr(static_batch, "ROOM", 16)


@pytest.mark.parametrize("family", [family for family in (*FAMILIES, *WITH_STATE) if family not in NOT_RECORDED])
def test_recorded_completions_are_those_of_generate(family: str) -> None:
    """Windows of 12 tokens move past prompts and past tokens of completions, and states follow their completions."""
    model, rows = policy(family, **(FAMILIES | WITH_STATE)[family]), prompts(5, 23, 9, 12)
    how = HOW | {"eos_token_id": [2, *range(50, 58)], "max_new_tokens": 40}
    alone = each_alone(model, padded(rows)(list(range(len(rows)))), how)
    for limit, group in ((None, GROUP), (6, GROUP), (5, 1)):
        assert complete(model, rows, limit, how, group) == alone
    steps = sum(max(len(tokens) for tokens in alone) for _ in range(3))
    assert Graph.replayed > steps - 2 * Graph.recorded, "all steps but those that are recorded"


def test_steps_are_recorded_anew_when_their_memory_moves() -> None:
    model, rows = policy("llama"), prompts(5, 9)
    complete(model, rows, how=HOW | {"eos_token_id": None, "max_new_tokens": 60})
    assert Graph.recorded == 3, "room for 16, 32 and 60 tokens"


def test_rows_are_dropped_when_few_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording takes as long as several steps, so that it has to be worth it."""
    monkeypatch.setattr(static_batch, "ROOM", 64)
    model, rows, sizes = policy("llama"), prompts(5, 23, 9, 12), list[int]()
    model.register_forward_pre_hook(lambda module, args, given: sizes.append(len(given["input_ids"])), with_kwargs=True)
    how = HOW | {"eos_token_id": [2, *range(50, 58)], "max_new_tokens": 40, "do_sample": True}
    torch.manual_seed(0)
    complete(model, rows, how=how)
    of_steps = list(dict.fromkeys(sizes[sizes.index(len(rows)) :]))  # behind those of trials
    assert len(of_steps) > 1
    assert all(fewer <= before / 4 for before, fewer in pairwise(of_steps))


@pytest.mark.parametrize(("limit", "top_k"), [(None, 0), (600, 0), (None, 2)])
def test_recorded_completions_are_drawn_by_probabilities(limit: int | None, top_k: int) -> None:
    assert_drawn_by_probabilities(limit, top_k)
    assert Graph.replayed


def test_adapters_and_autocast_are_recorded_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = policy("llama"), prompts(5, 23, 9)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()
    assert complete(model, rows) == each_alone(model, padded(rows)(list(range(len(rows)))), HOW)
    with torch.autocast("cpu", torch.bfloat16):
        recorded, replayed = complete(model, rows), Graph.replayed
        monkeypatch.setattr(static_batch, "tried", lambda record: (None, "not recorded"))
        assert complete(model, rows) == recorded
    assert Graph.replayed == replayed > 0


def test_what_is_not_recorded_says_why(caplog: pytest.LogCaptureFixture) -> None:
    config = GenerationConfig(repetition_penalty=1.5)
    assert "repetition_penalty=1.5" in str(why_not_static(policy("llama"), config))
    assert "chunks" in str(why_not_static(policy("llama", attention_chunk_size=4), GenerationConfig()))
    for family, why in NOT_RECORDED.items():
        of_family = policy(family, **(FAMILIES | WITH_STATE)[family])
        assert why in str(why_not_joined(of_family, StaticBatch(records=False)))
    model, rows = policy("llama"), prompts(5, 23, 9)
    alone = each_alone(model, padded(rows)(list(range(len(rows)))), HOW)

    def reads(module: Any, args: Any, outputs: Any) -> None:
        assert outputs.logits.sum().item() != 0.0

    def differs(module: Any, args: Any, outputs: Any) -> None:
        if Graph.capturing:
            outputs.logits = -outputs.logits

    caplog.set_level("INFO")
    for hook, reason in ((reads, "stream is capturing"), (differs, "has other logits")):
        handle, batching = model.register_forward_hook(hook), ContinuousBatching()
        for _ in range(3):
            assert batching.complete(model, first_equal(rows), padded(rows), NAMES, HOW, "", GROUP) == alone
        assert sum(reason in message for message in caplog.messages) == 1, "two later calls, one line"
        handle.remove()
    assert Graph.replayed == 1, "to compare"


def test_a_policy_that_ignores_positions_is_not_recorded() -> None:
    model = policy("gpt2", n_layer=2, n_head=4, n_embd=64, n_positions=64)
    forward = model.forward
    model.forward = lambda *args, position_ids=None, **options: forward(*args, **options)
    assert why_not_joined(model, StaticBatch(records=False))


def test_after_an_oom_recorded_completions_are_fewer() -> None:
    model, rows = policy("llama"), prompts(5, 23, 9, 12)
    alone = each_alone(model, padded(rows)(list(range(len(rows)))), HOW)
    batching, limits = ContinuousBatching(), list[int]()

    def too_many(module: Any, args: Any, given: Any) -> None:
        if len(given["input_ids"]) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    model.register_forward_pre_hook(too_many, with_kwargs=True)
    given = (model, first_equal(rows), padded(rows), NAMES, HOW, "lower the length", GROUP)
    assert batching.complete(*given, retry=limits.append) == alone
    assert limits == [8, 4]
    assert Graph.replayed


class Masks(TorchDispatchMode):
    """Notes the shapes of queries, keys and masks, and the steps of masks in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.seen.append((args[0], args[1], (kwargs or {}).get("attn_mask")))
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_masks_are_those_that_the_kernel_of_a_gpu_takes(family: str) -> None:
    """It wants all four dimensions, and steps of 16 bytes between rows."""
    model, rows = policy(family, **FAMILIES[family]), prompts(5, 23, 9)
    with Masks() as masks:
        ContinuousBatching().complete(model, first_equal(rows), padded(rows), NAMES, HOW, "", GROUP)
    of_steps = [of for of in masks.seen if of[0].size(1) == 2]  # the heads of keys; the model itself has 4 of queries
    assert of_steps
    for query, key, mask in of_steps:
        assert mask is not None
        assert mask.shape == (*query.shape[:3], key.size(2))
        assert mask.stride(3) == 1
        assert all(4 * step % 16 == 0 for step in mask.stride()[:3])


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_completions_after_images_are_recorded(family: str) -> None:
    processor = make_processor(family)
    model = make_policy(family, processor).float().eval()
    rows = [prompt_of(row) for row in problems().select((0, 1, 3)) for _ in range(GROUP)]

    def inputs_of(places: list[int]) -> Any:
        return encode(processor, [rows[place] for place in places])

    everything = inputs_of(list(range(len(rows))))
    alone = each_alone(model, everything, HOW)
    for limit in (None, 5):
        given = (model, first_equal(rows), inputs_of, everything.keys(), HOW, "", GROUP)
        assert ContinuousBatching(limit).complete(*given) == alone
    assert Graph.replayed


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text"])
def test_recorded_turns_continue_where_no_key_is_lost(family: str) -> None:
    model, rows = policy(family, **TURNS[family]), prompts(5, 9)
    how = HOW | {"max_new_tokens": 6, "eos_token_id": list(range(2, 20)), "do_sample": True}
    batching, read = ContinuousBatching(), list[int]()

    def note(module: Any, args: Any, given: Any) -> None:
        read.append(given["input_ids"].size(1))

    with batching.several_turns():
        completed = batching.complete(model, first_equal(rows), padded(rows), NAMES, how, "", GROUP)
        results = [[40 + place] * (1 + place % 4) for place in range(len(rows))]
        asked = [[*row, *words, *result] for row, words, result in zip(rows, completed, results, strict=True)]
        alone, replayed = ends_of(model, asked, HOW), Graph.replayed
        assert replayed
        model.register_forward_pre_hook(note, with_kwargs=True)
        assert batching.complete(model, first_equal(asked), padded(asked), NAMES, HOW, "") == alone
    assert Graph.replayed > replayed
    assert max(read) == (5 if family == "llama" else max(map(len, asked))), "from the last token of a turn on"
