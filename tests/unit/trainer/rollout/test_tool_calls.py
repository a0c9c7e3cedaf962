"""Rollouts with tools and environments beside stock TRL's, by policies whose turns are drawn from a seed."""

import io
import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from pandas import read_parquet
from PIL import Image
from rich.console import Console
from transformers import AutoTokenizer
from trl import GRPOTrainer, prepare_multimodal_messages
from trl.trainer.utils import print_prompt_completions_sample

from grpo.builtin.tasks.calculator import calculator
from grpo.config.schema import ROOT
from grpo.evaluation.in_training import evaluate_policy
from grpo.evaluation.loop import Decoding, Evaluation
from grpo.options import Rollout
from grpo.reporting.completions import said
from grpo.trainer import ExactGRPOTrainer
from grpo.trainer.rollout.episodes import answers
from grpo.trainer.rollout.image_tokens import check_sees, without_image_tokens
from grpo.trainer.rollout.tool_calls import loggable, parsed, valid
from grpo.utils.errors import GenerationError
from rewards.isolation.reward import Reward
from tests.stock_trl import (
    KL_FOUR_SLICES,
    ROUNDING,
    SMALL,
    doubled,
    generated_at_once,
    make,
    note_kept,
    relative_difference,
    tiny_llama,
    train,
)
from tests.vision_policies import make_policy, make_processor, problems

TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "grpo" / "builtin" / "tiny_calculator")
QUESTIONS = [f"Mia has {number} apples. How many apples does she have now?" for number in range(48)]
PROMPTS = [[{"role": "user", "content": question}] for question in QUESTIONS]


PICTURE = Image.new("RGB", (56, 28), (200, 0, 0))


def look(expression: str) -> list[Any]:
    """Look closer.

    Args:
        expression: where
    """
    return [{"type": "text", "text": "now"}, {"type": "image", "image": PICTURE}]


look.__name__ = "calculator"  # which the drawn turns call


class Game:
    """A number is to be guessed."""

    def reset(self, number: int, **columns: Any) -> str:
        self.number, self.guesses = number, 0
        return " Ben has 5."

    def calculator(self, expression: int) -> str:
        """Guess the number, under names that the vocabulary has.

        Args:
            expression: From 0 to 9
        """
        self.guesses += 1
        return "now" if expression == self.number else "more" if expression < self.number else "times"

    def get_reward(self) -> float:
        return float(self.guesses % 3)


def drawn_turn(trainer: Any, generator: torch.Generator) -> list[int]:
    """A call, a call with wrong arguments, half of a call, a call of no tool, or any tokens."""
    kind, number = (int(torch.randint(0, 10, (), generator=generator)) for _ in range(2))
    plays = trainer.environment_factories is not None
    calls = {0: "{", 1: json.dumps({"name": "apples", "arguments": {}})}
    calls[2] = json.dumps({"name": "calculator", "arguments": {"expression": "apples", "name": 1}})
    call = {"name": "calculator", "arguments": {"expression": number if plays else f"{number} * {kind}"}}
    text = calls.get(kind, json.dumps(call))
    if kind < 6:
        return TOKENIZER(f"<tool_call>{text}</tool_call>")["input_ids"] + [TOKENIZER.eos_token_id]
    length = int(torch.randint(1, 8, (), generator=generator))
    tokens = torch.randint(7, len(TOKENIZER), (length,), generator=generator).tolist()
    return tokens + [TOKENIZER.eos_token_id] * (kind % 2)


def with_tools(kind: type[GRPOTrainer], directory: Path, **options: Any) -> Any:
    """A trainer whose policy takes drawn turns, the same ones for each kind of trainer."""
    if not options.keys() & {"tools", "environment_factory", "rollout_func"}:
        options["tools"] = [calculator]
    defaults = {"rollout_func": None, "max_completion_length": 60, "max_tool_calling_iterations": 2}
    data = Dataset.from_dict({"prompt": PROMPTS, "number": [row % 10 for row in range(48)]})
    known = {"model": tiny_llama(len(TOKENIZER)), "processing_class": TOKENIZER, "train_dataset": data}
    trainer = make(kind, directory, **{**defaults, "reward_funcs": reward, **known, **options})
    generator = torch.Generator().manual_seed(7)

    def single_turn(prompt_ids: list, images: Any, fields: Any, num_generations: int, **how: Any) -> tuple[list, None]:
        return [drawn_turn(trainer, generator) for _ in prompt_ids], None

    trainer._generate_single_turn = single_turn
    return trainer


def reward(completion_ids: list[list[int]], prompts: list, **columns: Any) -> list[float]:
    """Anything, but equal within the groups of every third problem."""
    return [
        0.5 if len(prompt[0]["content"]) % 3 == 0 else (sum(ids) % 7) / 3
        for ids, prompt in zip(completion_ids, prompts, strict=True)
    ]


@pytest.mark.parametrize("kind", ["tools", "environment"])
@pytest.mark.parametrize("options", [{"loss_type": "dapo"}, KL_FOUR_SLICES], ids=["dapo", "KL, two iterations, slices"])
def test_the_gradient_with_tools_is_that_of_stock_trl(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    given = {"environment_factory": Game} if kind == "environment" else {}
    mine = train(doubled(with_tools(ExactGRPOTrainer, tmp_path, update=SMALL, **options, **given)))
    theirs = train(doubled(with_tools(GRPOTrainer, tmp_path, **options, **given)), start_from=mine.weights)
    for gradient, expected in zip(mine.gradients, theirs.gradients, strict=True):
        assert relative_difference(gradient, expected) < 1e-5
    assert mine.logs[0]["tools/call_frequency"] > 0.3
    for row, expected in zip(mine.logs, theirs.logs, strict=True):
        for name in ("loss", "reward", "tools/call_frequency", "tools/failure_frequency", "completions/mean_length"):
            assert row.get(name) == pytest.approx(expected.get(name), abs=ROUNDING), name


@pytest.mark.parametrize("kind", ["tools", "environment"])
def test_dynamic_sampling_keeps_whole_conversations(tmp_path: Path, kind: str) -> None:
    given = {"environment_factory": Game} if kind == "environment" else {}
    rollout = Rollout(dynamic_sampling=True)
    trainer = with_tools(ExactGRPOTrainer, tmp_path, update=SMALL, rollout=rollout, log_completions=True, **given)
    kept = note_kept(trainer)
    mine = train(trainer)
    assert any(0 in one.mask for generation in kept for one in generation)
    rows = generated_at_once(trainer, kept)
    stock = with_tools(GRPOTrainer, tmp_path / "stock", reward_funcs=scores_of(trainer, kept), **rows)
    theirs = train(stock, start_from=mine.weights)
    for gradient, expected in zip(mine.gradients, theirs.gradients, strict=True):
        assert relative_difference(gradient, expected) < 1e-5
    for row, generation in zip(mine.logs, kept, strict=True):
        results = [message for one in generation for message in one.messages if message["role"] == "tool"]
        assert row["tools/call_frequency"] == pytest.approx(len(results) / len(generation))
        assert 0 < row["tools/failure_frequency"] < 1
    logged = read_parquet(tmp_path / "completions" / "completions_00002.parquet")["completion"]
    assert [len(messages) for messages in logged] == [len(one.messages) for one in kept[-1]]


def test_kept_prompts_have_what_the_environment_says_first(tmp_path: Path) -> None:
    options = {"environment_factory": Game, "rollout": Rollout(dynamic_sampling=True), "log_completions": True}
    train(with_tools(ExactGRPOTrainer, tmp_path, **options))
    for file in (tmp_path / "completions").glob("*.parquet"):
        for prompt in read_parquet(file)["prompt"]:
            assert prompt[-1]["content"].endswith("now? Ben has 5.")


WITH_IMAGES = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}<tool_response>{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}{% for call in message['tool_calls'] or [] %}"
    "<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "{{ {'tool': '</tool_response>\\n', 'assistant': eos_token}.get(message['role'], '\\n') }}{% endfor %}"
)


def test_environments_with_images_are_sampled_dynamically(tmp_path: Path) -> None:
    processor = make_processor("qwen2_vl", base="tiny_calculator")
    processor.chat_template = WITH_IMAGES
    data = problems().add_column("number", [row % 10 for row in range(16)])
    options = {"environment_factory": Game, "rollout": Rollout(dynamic_sampling=True), "log_completions": True}
    known = {"model": make_policy("qwen2_vl", processor), "processing_class": processor, "train_dataset": data}
    trainer = with_tools(ExactGRPOTrainer, tmp_path, **options, **known)
    assert len(train(trainer).logs) == 2
    for prompt in read_parquet(tmp_path / "completions" / "completions_00002.parquet")["prompt"]:
        assert prompt[-1]["content"][-1]["text"].endswith(" Ben has 5.")


def test_an_engine_reads_the_descriptions_of_tools_beside_images(tmp_path: Path) -> None:
    processor = make_processor("qwen2_vl", base="tiny_calculator")
    processor.chat_template = WITH_IMAGES + "{% for tool in tools or [] %}<tool_call>{% endfor %}"
    known = {"model": make_policy("qwen2_vl", processor), "processing_class": processor, "train_dataset": problems()}
    trainer = with_tools(ExactGRPOTrainer, tmp_path, tools=[calculator], **known)
    given: list[list[list[int]]] = []
    trainer.use_vllm, trainer.vllm_mode = True, "colocate"
    trainer.vllm_generation = SimpleNamespace(expands_images=True, give_images=lambda *prompts: given.extend(prompts))
    row = trainer.train_dataset[0]
    trainer._tokenize_prompts([prepare_multimodal_messages(row["prompt"], row["images"])])
    expanded, unexpanded = ([token for token in ids[0] if token != processor.image_token_id] for ids in given)
    assert expanded == unexpanded
    assert expanded[-1] == processor.tokenizer.convert_tokens_to_ids("<tool_call>")


@pytest.mark.parametrize("options", [{"loss_type": "dapo"}, KL_FOUR_SLICES | {"beta": 0.0}], ids=["dapo", "slices"])
def test_the_gradient_with_images_of_tools_is_stock_trls(tmp_path: Path, options: dict[str, Any]) -> None:
    processor = make_processor("qwen2_vl", base="tiny_calculator")
    processor.chat_template = WITH_IMAGES
    known = {"processing_class": processor, "train_dataset": problems(), "tools": [look], "max_completion_length": 80}

    def trainer(kind: type[GRPOTrainer], **others: Any) -> Any:
        return with_tools(kind, tmp_path, model=make_policy("qwen2_vl", processor), **known, **options, **others)

    mine = train(doubled(trainer(ExactGRPOTrainer, update=SMALL)))
    theirs = train(doubled(trainer(GRPOTrainer)), start_from=mine.weights)
    assert mine.logs[0]["tools/call_frequency"] > 0.3
    for gradient, expected in zip(mine.gradients, theirs.gradients, strict=True):
        assert relative_difference(gradient, expected) < 1e-5


def scores_of(trainer: Any, kept: list) -> Any:
    """A reward that repeats what the kept completions have earned, all rewards together."""
    generations = iter(kept)

    def repeated(completion_ids: list, **columns: Any) -> list[float]:
        return [float(sum(one.rewards)) for one in next(generations)]

    return repeated


def test_calls_and_errors_of_each_tool_count_dropped_groups_too(tmp_path: Path) -> None:
    calls, errors = Counter[str](), Counter[str]()

    def counting(expression: str) -> str:
        """Calculate.

        Args:
            expression: Any
        """
        calls["counting"] += 1
        if expression[0] < "5":
            errors["counting"] += 1
            raise ValueError("three")
        return calculator(expression)

    counting.__name__ = "calculator"
    options = {"tools": [counting], "rollout": Rollout(dynamic_sampling=True)}
    options["tool_counts"] = lambda: (
        Counter({"calculator": calls["counting"]}),
        Counter({"calculator": errors["counting"]}),
    )
    trainer = with_tools(ExactGRPOTrainer, tmp_path, **options)
    logs = train(trainer).logs
    assert sum(row["tools/calculator/calls"] for row in logs) == calls["counting"] > 0
    assert sum(row["tools/calculator/errors"] for row in logs) == errors["counting"] > 0
    assert all(0 < row["tools/unanswered"] < 1 for row in logs)


def test_conversations_with_arguments_of_mixed_types_are_logged(tmp_path: Path) -> None:
    trainer = with_tools(ExactGRPOTrainer, tmp_path, log_completions=True, environment_factory=Game, max_steps=1)
    train(trainer)
    (file,) = (tmp_path / "completions").glob("*.parquet")
    calls = [
        json.loads(call["function"]["arguments"])
        for messages in read_parquet(file)["completion"]
        for message in messages
        if message.get("tool_calls") is not None
        for call in message["tool_calls"]
    ]
    assert {type(call["expression"]) for call in calls if call} == {int, str}


def test_an_evaluation_calls_tools_greedily_and_leaves_no_trace(tmp_path: Path) -> None:
    trainer = with_tools(ExactGRPOTrainer, tmp_path, environment_factory=Game)
    how, seen = [], trainer._generate_single_turn

    def noted(*args: Any, **options: Any) -> Any:
        how.append((trainer.generation_config.do_sample, trainer.num_generations_eval))
        return seen(*args, **options)

    trainer._generate_single_turn = noted
    before = trainer.generation_config
    trainer.model.eval()
    conversations = answers(trainer, [trainer.train_dataset[row] for row in range(8)])
    assert set(how) == {(False, 1)}
    assert len(how) == 3  # a turn, and one after each of two calls
    assert any(message["role"] == "tool" for messages in conversations for message in messages)
    assert trainer.generation_config is before
    assert trainer.generation_config.do_sample
    assert not trainer._metrics["train"]


def test_an_evaluation_has_no_more_environments_than_a_rollout(tmp_path: Path) -> None:
    trainer = with_tools(ExactGRPOTrainer, tmp_path, environment_factory=Game)
    rows = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    trainer.use_vllm, trainer.vllm_mode = True, "server"  # whose evaluations take 1,024 prompts at once
    trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None, greedy=nullcontext)
    held_out = trainer.train_dataset.add_column("answer", ["7"] * 48)
    grader, console = Reward("rewards.correctness.correctness", "correctness"), Console(file=io.StringIO())
    try:
        evaluation = Evaluation(held_out, grader, Decoding(60), tmp_path / "evaluation.jsonl", 8, console)
        result = evaluate_policy(trainer, evaluation)
    finally:
        grader.close()
    assert result["samples"] == 48 > rows
    (pool,) = trainer._environment_pool.values()
    assert len(pool) == rows


def test_a_later_turn_generates_what_is_left_of_its_completion(tmp_path: Path) -> None:
    trainer = make(ExactGRPOTrainer, tmp_path, rollout_func=None, max_completion_length=20)
    trainer.generation_config.eos_token_id = trainer.eos_token_ids = [10_000]  # which no policy draws
    computed: list[int] = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, given: computed.append(given["input_ids"].size(1)), with_kwargs=True
    )
    ids, images, fields = trainer._tokenize_prompts(["How many ?", "1 2"])
    turns = [[*ids[0], *range(3, 15)], [*ids[1], *range(3, 18)]]
    trainer._generate_single_turn(turns, images, fields, 1)  # with the trials of a first generation
    computed.clear()
    completions, _ = trainer._generate_single_turn(turns, images, fields, 1)
    assert list(map(len, completions)) == [20 - 12, 20 - 15]
    assert len(computed) == 8, "a pass per token of the longest"
    first, _ = trainer._generate_single_turn(ids, images, fields, 1)
    assert list(map(len, first)) == [20, 20]


def test_tasks_of_a_mixture_have_their_limits_in_later_turns_too(tmp_path: Path) -> None:
    """Whichever of them have called a tool."""
    trainer = make(ExactGRPOTrainer, tmp_path, rollout_func=None, max_completion_length=20)
    trainer.generation_config.eos_token_id = trainer.eos_token_ids = [10_000]
    trainer.rollouts.completer._limits = [20, 6]
    ids, images, fields = trainer._tokenize_prompts(["How many ?", "1 2"])
    completions, _ = trainer._generate_single_turn([[*ids[1], 3, 4, 5, 6]], images, fields, 1)
    assert list(map(len, completions)) == [2]


def test_limits_of_rollouts_do_not_outlive_them(tmp_path: Path) -> None:
    """An evaluation by vLLM tokenizes prompts of its own, in another number."""
    trainer = make(ExactGRPOTrainer, tmp_path, rollout_func=None, max_completion_length=20)
    trainer.rollouts.completer._limits = [20, 6]
    trainer.rollouts.completer.generate(trainer, ["How many ?", "1 2"])
    trainer._tokenize_prompts(["1 2", "How many ?", "2"])
    assert set(trainer.rollouts.completer._begun.values()) == {20}


@pytest.mark.parametrize("arguments", ["1 + 2", '"1 + 2"', "[1, 2]", "", "{", 7, None, [1], {"a": "\ud800"}])
def test_odd_arguments_of_a_call_are_logged_and_shown(arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "calculator", "arguments": arguments}}
    messages = [valid({"role": "assistant", "content": "", "tool_calls": [call]})]
    logged = [loggable(message) for message in messages]
    print_prompt_completions_sample(["a"], [logged], {}, None, 1)
    shown = said([*logged, {"role": "tool", "name": "calculator", "content": "an error"}])["turns"]
    assert [turn["text"].startswith("calculator(") for turn in shown] == [True, False]


@pytest.mark.parametrize("depth", [120, 3000])
def test_nested_calls_are_text(depth: int) -> None:
    """What a collapsed policy repeats is too deep for Python's JSON parser, or for what copies and writes it."""

    def written(depth: int) -> str:
        arguments = "[" * depth + "]" * depth
        return f'<tool_call>{{"name": "calculator", "arguments": {{"expression": {arguments}}}}}</tool_call>'

    class Tokenizer:
        response_template, eos_token = TOKENIZER.response_template, TOKENIZER.eos_token

        def parse_response(self, ids: list[int], prefix: Any = None, **options: Any) -> Any:
            return TOKENIZER.parse_response(written(depth), **options)

        def decode(self, ids: list[int], **options: Any) -> str:
            return "as it is"

    assert parsed(Tokenizer(), [1], prefix=[2]) == {"role": "assistant", "content": "as it is"}


def test_a_policy_that_reads_text_alone_is_shown_no_image() -> None:
    processor, tiles = make_processor("qwen2_vl"), make_processor("llava_next")
    text = {"role": "tool", "name": "page", "content": [{"type": "text", "text": "a"}]}
    picture = {"role": "tool", "name": "look", "content": [{"type": "image", "image": PICTURE}]}
    check_sees(TOKENIZER, [text, text | {"content": "b"}])
    check_sees(processor, [text, picture])
    for blind in (TOKENIZER, tiles):
        with pytest.raises(GenerationError, match=r"^tool 'look' returned an image, .* like Qwen-VL can read"):
            check_sees(blind, [text, picture])


def test_a_tool_cannot_write_the_token_of_an_image(tmp_path: Path) -> None:
    processor = make_processor("qwen2_vl", base="tiny_calculator")
    messages = [
        {"role": "tool", "name": "page", "content": f"a {processor.image_token} b"},
        {
            "role": "tool",
            "name": "page",
            "content": [{"type": "text", "text": processor.image_token}, {"type": "image"}],
        },
    ]
    cleaned = without_image_tokens(messages, processor)
    assert cleaned[0]["content"] == "a  b"
    assert cleaned[1]["content"] == [{"type": "text", "text": ""}, {"type": "image"}]
    assert processor.image_token in messages[0]["content"], "the conversation stays as it is"
