"""Completions by transformers with each prompt read once, against `generate` alone."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo.config.schema import ROOT
from grpo.generation.transformers.completer import Completer, encode
from grpo.generation.transformers.continuous_batch import ContinuousBatch, why_not_shared
from grpo.generation.transformers.continuous_batching import ContinuousBatching, each_alone, first_equal
from grpo.generation.transformers.prompt_cache import why_repeated
from grpo.generation.transformers.trial import why_not_joined
from grpo.utils.errors import DoesNotFit
from grpo.view.images import prompt_of
from tests.hybrids import HYBRIDS, NOT_CONTINUED
from tests.vision_policies import FAMILIES as VISION_FAMILIES
from tests.vision_policies import make_policy, make_processor, problems

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "max_position_embeddings": 128},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3},
}
WINDOW = {"sliding_window": 12}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("llama", "qwen2", "qwen3", "smollm3", "olmo2", "granite", "glm4", "cohere", "gpt_neox")},
    **{name: WINDOW for name in ("mistral", "ministral", "gemma2", "gemma3_text", "phi3", "starcoder2")},
    **{"qwen3_moe": EXPERTS, "gpt_oss": EXPERTS | WINDOW, "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4}},
}
WITH_STATE = {name: {"hidden_size": 32, "head_dim": 8, "num_hidden_layers": 3, **of} for name, of in HYBRIDS.items()}
STATE_SPACE = {"mamba": {"state_size": 8}}
SLOW = pytest.mark.slow
GROUP, LENGTH = 4, 30
HOW = {"do_sample": False, "max_new_tokens": LENGTH}


def policy(family: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | options)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def prompts(*lengths: int, group: int = GROUP) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    each = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in lengths]
    return [prompt for prompt in each for _ in range(group)]


def padded(rows: list[list[int]]) -> Callable[[list[int]], dict[str, torch.Tensor]]:
    def inputs_of(places: list[int]) -> dict[str, torch.Tensor]:
        width = max(len(rows[place]) for place in places)
        ids = [[0] * (width - len(rows[place])) + rows[place] for place in places]
        mask = [[0] * (width - len(rows[place])) + [1] * len(rows[place]) for place in places]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}

    return inputs_of


def complete(model: Any, rows: list[list[int]], limit: int | None = None, how: Any = HOW, group: int = GROUP) -> Any:
    names = ("input_ids", "attention_mask")
    return ContinuousBatching(limit).complete(
        model, first_equal(rows), padded(rows), names, how, "lower the length", group
    )


@contextmanager
def computed(model: Any) -> Iterator[list[tuple[int, int]]]:
    """Sequences and tokens of each forward pass, without those of trials."""
    shapes, trials = list[tuple[int, int]](), list[int]()
    hook = model.register_forward_pre_hook(
        lambda module, args, given: shapes.append(tuple(given["input_ids"].shape)), with_kwargs=True
    )
    why_not_joined(model, ContinuousBatch())
    trials.append(len(shapes))
    why_not_joined(model, ContinuousBatch(shares_from=0))
    joined, shared = [*shapes[: trials[0]]], [*shapes[trials[0] :]]
    shapes.clear()
    yield shapes
    hook.remove()
    for trial in (joined, shared):
        if trial and shapes[: len(trial)] == trial:
            del shapes[: len(trial)]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            family, marks=() if family in ("llama", "gemma3_text", "gpt_oss", "mamba", "lfm2", "qwen3_5_text") else SLOW
        )
        for family in (*FAMILIES, *WITH_STATE, *STATE_SPACE)
    ],
)
def test_greedy_completions_are_those_of_generate_alone(family: str) -> None:
    rows, length = (prompts(5, 9), 8) if family in STATE_SPACE else (prompts(5, 23, 9), 16)
    model, how = policy(family, **(FAMILIES | WITH_STATE | STATE_SPACE)[family]), HOW | {"max_new_tokens": length}
    alone = each_alone(model, padded(rows)(list(range(len(rows)))), how)
    assert len({len(tokens) for tokens in alone}) > 1 or len(alone[0]) == length
    assert (why_repeated(model) is None) == ("sliding_window" not in FAMILIES.get(family, WINDOW))
    for limit in (None, 5, 3):
        with computed(model) as shapes:
            assert complete(model, rows, limit, how) == alone
        read = sum(count * tokens for count, tokens in shapes if tokens > 1)
        if family in STATE_SPACE:
            assert why_not_shared(model, ["input_ids"]) == "none of its layers has keys"
        else:
            assert read <= 3 * 23 if limit != 3 else 2 * 3 * 23, "each prompt is read once, or once per part of a group"
    assert complete(model, rows, 5, how, group=1) == alone, "one joins when another has ended"


def test_processes_that_compute_each_token_together_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process alone, which asks all of them before each token whether any has completions left."""
    model, rows = policy("llama"), prompts(5, 23, 9)
    alone = complete(model, rows)
    for module in ("continuous_batch", "continuous_batching"):
        monkeypatch.setattr(f"grpo.generation.transformers.{module}.in_step", lambda model: True)
    for trial in ("why_not_joined", "why_repeated"):
        monkeypatch.setattr(f"grpo.generation.transformers.continuous_batching.{trial}", lambda *_: None)
    asked: list[bool] = []
    reduce = torch.distributed.all_reduce
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)

    def others_have_some(tensor: torch.Tensor, **options: Any) -> None:
        reduce(tensor, **options)
        asked.append(bool(tensor))
        if len(asked) % 40:  # longer than any of ours
            tensor.fill_(1.0)

    monkeypatch.setattr("torch.distributed.all_reduce", others_have_some)
    try:
        assert complete(model, rows, limit=5) == alone
    finally:
        torch.distributed.destroy_process_group()
    assert len(asked) == 3 * 40, "a part after the other, each as long as others need"


def ends_of(model: Any, rows: list[list[int]], how: Any) -> list[list[int]]:
    return each_alone(model, padded(rows)(list(range(len(rows)))), how)


@pytest.mark.parametrize(
    "options",
    [
        {"min_new_tokens": 20},
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
        {"eos_token_id": [2, *range(40, 60)]},
        {"bad_words_ids": [[5], [7, 9]], "suppress_tokens": list(range(60, 80))},
    ],
    ids=str,
)
def test_penalties_and_ends_act_as_in_generate(options: dict[str, Any]) -> None:
    model, rows = policy("llama"), prompts(5, 23, 9)
    how = HOW | {"eos_token_id": [2, *range(50, 60)]} | options
    alone = ends_of(model, rows, how)
    assert alone != ends_of(model, rows, HOW)
    for limit in (None, 5):
        assert complete(model, rows, limit, how) == alone


class KnowsPadding:
    """A processor with a state per sequence, as the repetition penalty has it since transformers 5.24."""

    def __init__(self, padding: list[int]) -> None:
        self.prompt_ignore_length, self.sizes = torch.tensor(padding), list[int]()

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert self.prompt_ignore_length.tolist() == (ids != 0).int().argmax(1).tolist()
        self.sizes.append(len(ids))
        return scores


def test_the_state_of_a_processor_follows_its_completions() -> None:
    model, rows, processor = policy("llama"), prompts(5, 23, 9), KnowsPadding([18, 0, 14])
    how = HOW | {"eos_token_id": list(range(2, 30)), "do_sample": True, "logits_processor": [processor]}
    numbers = [range(start, start + GROUP) for start in range(0, len(rows), GROUP)]
    ContinuousBatch().begin(model, padded(rows[::GROUP])([0, 1, 2]), numbers, 0, **how)
    assert processor.sizes[0] == len(rows) > len(set(processor.sizes)) > 3, "completions end one after the other"


def test_completions_that_have_ended_are_not_computed() -> None:
    model, rows = policy("llama"), prompts(5, 23, 9)
    how = HOW | {"eos_token_id": list(range(2, 30)), "do_sample": True}
    with computed(model) as shapes:
        lengths = [len(tokens) for tokens in complete(model, rows, how=how)]
    assert len(set(lengths)) > 3
    assert shapes == [(3, 23), *((sum(length > step for length in lengths), 1) for step in range(1, max(lengths)))]


def test_keys_are_not_copied_per_query_head_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(*_: Any) -> None:
        raise AssertionError("keys were copied")

    monkeypatch.setattr("transformers.integrations.sdpa_attention.repeat_kv", copied)
    assert len(complete(policy("llama"), prompts(5, 23, 9))) == 3 * GROUP


def test_waiting_completions_take_the_place_of_ended_ones() -> None:
    model, rows = policy("llama"), prompts(*range(4, 20))
    how = HOW | {"eos_token_id": list(range(2, 30)), "do_sample": True}
    with computed(model) as shapes:
        complete(model, rows, limit=8, how=how)
    sizes = [count for count, tokens in shapes if tokens == 1]
    assert max(sizes) <= 8
    assert sum(tokens > 1 for _, tokens in shapes) == 15, "two prompts, and then one at a time"
    assert sizes[len(sizes) // 2] > 4, "there are others when some have ended"


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_each_image_is_looked_at_once(family: str) -> None:
    processor = make_processor(family)
    model = make_policy(family, processor).float().eval()
    rows = [prompt_of(row) for row in problems().select((0, 1, 3)) for _ in range(GROUP)]
    tower = next(module for name, module in model.named_modules() if name.endswith(("visual", "vision_tower")))
    seen: list[int] = []
    tower.register_forward_pre_hook(
        lambda module, args, given: seen.append(len(next(iter([*args, *given.values()])))), with_kwargs=True
    )

    def inputs_of(places: list[int]) -> Any:
        return encode(processor, [rows[place] for place in places])

    everything = inputs_of(list(range(len(rows))))
    alone = each_alone(model, everything, HOW)
    by_each = seen.pop()
    for limit in (None, 5):
        ours = ContinuousBatching(limit).complete(
            model, first_equal(rows), inputs_of, everything.keys(), HOW, "lower", GROUP
        )
        assert ours == alone
        assert sum(seen) == by_each / GROUP
        seen.clear()


@pytest.mark.parametrize("limit", [None, 600])
def test_sampled_completions_have_the_distribution_of_the_policy(limit: int | None) -> None:
    assert_drawn_by_probabilities(limit, top_k=0)


def assert_drawn_by_probabilities(limit: int | None, top_k: int) -> None:
    """Of 6 tokens, with one that ends; the expected frequencies are products of the policy's own probabilities."""
    model, temperature = policy("llama", initializer_range=0.5), 0.7
    rows = [[3, 4, 5]] * 2000 + [[5, 3]] * 2000
    how = {"do_sample": True, "temperature": temperature, "top_k": top_k, "max_new_tokens": 3}
    torch.manual_seed(0)
    found = complete(model, rows, limit, how | {"suppress_tokens": list(range(6, 97))}, group=500)
    for prompt, drawn in (([3, 4, 5], found[:2000]), ([5, 3], found[2000:])):
        expected = probabilities(model, prompt, 3, temperature, top_k or 6)
        assert sum(expected.values()) == pytest.approx(1.0, abs=1e-4)
        frequencies = Counter(map(tuple, drawn))
        assert set(frequencies) <= set(expected)
        often = [tokens for tokens, probability in expected.items() if probability * 2000 >= 5]
        statistic = sum((frequencies[t] - 2000 * expected[t]) ** 2 / (2000 * expected[t]) for t in often)
        assert statistic < len(often) + 4 * (2 * len(often)) ** 0.5, "chi-squared, by four standard deviations"


@torch.no_grad()
def probabilities(
    model: Any, prompt: list[int], length: int, temperature: float, count: int
) -> dict[tuple[int, ...], float]:
    """Of each completion of the `count` likeliest of 6 tokens."""
    logits = model(input_ids=torch.tensor([prompt])).logits[0, -1, :6] / temperature
    likeliest = logits.topk(count)
    result: dict[tuple[int, ...], float] = {}
    for token, probability in zip(likeliest.indices.tolist(), likeliest.values.softmax(-1).tolist(), strict=True):
        if length == 1 or token == model.config.eos_token_id:
            result[token,] = probability
        else:
            for rest, further in probabilities(model, [*prompt, token], length - 1, temperature, count).items():
                result[token, *rest] = probability * further
    return result


def test_after_an_oom_half_are_generated_at_once() -> None:
    model, rows = policy("llama"), prompts(5, 23, 9, 12)
    alone = ends_of(model, rows, HOW)
    batching, limits = ContinuousBatching(), list[int]()

    def too_many(module: Any, args: Any, given: Any) -> None:
        if len(given["input_ids"]) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    hook = model.register_forward_pre_hook(too_many, with_kwargs=True)
    for _ in range(2):
        names = ("input_ids", "attention_mask")
        given = (model, first_equal(rows), padded(rows), names, HOW, "lower the length", GROUP)
        assert batching.complete(*given, retry=limits.append) == alone
    assert limits == [8, 4], "what did not fit once is not tried again"
    hook.remove()
    model.forward = out_of_memory
    for tried in (batching, ContinuousBatching()):  # the second has not tried yet whether completions can share keys
        with pytest.raises(DoesNotFit, match="lower the length"):
            tried.complete(*given)


def out_of_memory(*args: Any, **given: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("conversational", [False, True])
def test_prompts_asked_several_times_are_read_once(conversational: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "grpo" / "builtin" / "tiny")
    model = AutoModelForCausalLM.from_pretrained(ROOT / "grpo" / "builtin" / "tiny", dtype=torch.float32).eval()
    texts = ["1 + 2 =", "47 + 35 = ?"]
    asked: list[Any] = [text for text in texts for _ in range(3)]
    if conversational:
        asked = [[{"role": "user", "content": text}] for text in asked]
    with computed(model) as shapes:
        answers = Completer(model, tokenizer, 12)(asked)
    assert shapes[0][0] == 2
    inputs = encode(tokenizer, asked)
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=12)[:, inputs["input_ids"].size(1) :]
    assert answers == tokenizer.batch_decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"guidance_scale": 2.0}, "guidance_scale=2.0"),
        ({"cache_implementation": "static"}, "cache_implementation=static"),
        ({"use_cache": False}, "use_cache=False"),
    ],
)
def test_what_cannot_share_says_why(options: dict[str, Any], reason: str) -> None:
    model = policy("llama")
    assert reason in (why_not_shared(model, ["input_ids"], GenerationConfig(**options)) or "")
    assert "cross_attention_mask" in (why_not_shared(model, ["cross_attention_mask"]) or "")


BOUNDED = ("nemotron_h", "zamba2")
"""In which transformers bounds time steps of tokens that it reads at once, and not that of a single token."""
TURNS = {
    **{name: FAMILIES[name] for name in ("llama", "gemma3_text")},
    **{name: of for name, of in WITH_STATE.items() if name not in BOUNDED},
    "jamba": NOT_CONTINUED["jamba"],
}


@pytest.mark.parametrize("family", TURNS)
def test_a_further_turn_continues_from_the_cache_of_the_last(family: str) -> None:
    """A window of 12 tokens has moved past some, and a state cannot be cut: such turns read in groups."""
    model, rows = policy(family, **TURNS[family]), prompts(5, 9)
    how = HOW | {"max_new_tokens": 6, "eos_token_id": list(range(2, 20)), "do_sample": True}
    names, batching = ("input_ids", "attention_mask"), ContinuousBatching()
    with batching.several_turns():
        said = batching.complete(model, first_equal(rows), padded(rows), names, how, "lower", GROUP)
        results = [[40 + place] * (1 + place % 4) for place in range(len(rows))]
        asked = [[*row, *words, *result] for row, words, result in zip(rows, said, results, strict=True)]
        alone = ends_of(model, asked, HOW)
        with computed(model) as shapes:
            assert batching.complete(model, first_equal(asked), padded(asked), names, HOW, "lower") == alone
    longest = max(map(len, asked))
    expected = {"llama": [(8, 5)], "jamba": [(8, longest)]}.get(family, [(2, 1), (2, 2), (2, 3), (2, 4), (8, 1)])
    assert shapes[: len(expected)] == expected, "the last token of a turn, and one to four of a result"
    assert batching.turns is None


def test_after_an_oom_no_caches_of_turns_are_kept() -> None:
    model, rows = policy("llama"), prompts(5, 9)
    names, batching = ("input_ids", "attention_mask"), ContinuousBatching(6)
    with batching.several_turns():
        batching.complete(model, first_equal(rows), padded(rows), names, HOW | {"max_new_tokens": 3}, "", GROUP)
        assert batching.turns is not None
        assert len(batching.turns.caches) <= 6, "no more than completions at once"

        def too_many(module: Any, args: Any, given: Any) -> None:
            if len(given["input_ids"]) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        hook = model.register_forward_pre_hook(too_many, with_kwargs=True)
        batching.complete(model, first_equal(rows), padded(rows), names, HOW | {"max_new_tokens": 3}, "", GROUP)
        hook.remove()
        assert not batching.turns.caches
