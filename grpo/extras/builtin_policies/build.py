"""Build a built-in policy, in up to half an hour on two cores: `python -m grpo.extras.builtin_policies.build tiny`.

Each policy learns the problems of its task from a noisy teacher, so that reinforcement learning can improve it:

- `tiny`, a Llama of one million parameters: every calculation of its teacher is correct, but in six steps of ten the
  operation does not fit the words. The policy computes correctly and usually picks an incorrect operation.
- `tiny_calculator`, the same with a tool: in three cases of ten the teacher calls the calculator and copies its result,
  in the others the teacher guesses. The policy copies numbers, words and results well, cannot calculate, and mostly
  does not call the calculator.
- `tiny_vision`, a LLaVA of one and a half million parameters: its teacher sees every shape, but in seven answers of ten
  forgets a shape in counting, or names only the colour of the largest. The policy sees well and usually answers
  incorrectly.
"""

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

import grpo.builtin
from grpo.builtin.tasks import arithmetic, calculator, shapes

FOLDER = Path(grpo.builtin.__file__).parent
POLICIES = {"tiny": (3000, 256), "tiny_calculator": (2200, 64), "tiny_vision": (2000, 64)}
"""Optimizer steps, and problems per step."""
NOISE = {"tiny": 0.6, "tiny_calculator": 0.7, "tiny_vision": 0.7}
"""Probability that the teacher takes an incorrect operation in a step, guesses, or gives the wrong answer."""
MISTAKES = {"+": "-", "-": "+", "*": "+", "/": "-"}
"""The operation that the noisy teacher substitutes for each operation."""
FURTHEST = 99
"""Largest distance of a guess from the answer; a guess is never correct."""
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
IMAGE = "<image>"
"""Token that stands for a part of an image."""
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
TOOL_TEMPLATE = """\
{%- for message in messages %}
{%- if message['role'] == 'tool' %}{{ '<tool_response>' + message['content'] | string + '</tool_response>\n' }}
{%- elif message['role'] == 'assistant' %}{{ message['content'] }}
{%- for call in message['tool_calls'] or [] %}
{{- '<tool_call>' + call['function'] | tojson + '</tool_call>' }}
{%- endfor %}{{ eos_token }}
{%- else %}{{ message['content'] + '\n' }}{% endif %}{% endfor %}"""
IMAGE_TEMPLATE = """\
{%- for message in messages %}{% if message['content'] is string %}{{ message['content'] }}
{%- else %}{% for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}
{%- endif %}{{ '\n' }}{% endfor %}"""
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<eos>", "content": "text"},
    },
}
"""How transformers reads the policy's messages, in the form of `tokenizer.response_template`."""
Batches = Iterator[dict[str, torch.Tensor]]


def solution(problem: arithmetic.Problem, rng: random.Random, noise: float = NOISE["tiny"]) -> str:
    """Return the teacher's solution: a line per calculation, then the answer after `####` as in GSM8K."""
    lines, value = [], problem.start
    for operation, number in problem.steps:
        mistake = MISTAKES[operation]
        if rng.random() < noise and arithmetic.calculate(value, mistake, number):
            operation = mistake
        result = arithmetic.calculate(value, operation, number)
        if not result:
            break
        lines.append(f"{value} {operation} {number} = {result}")
        value = result
    return "\n".join([*lines, f"#### {value}"])


def call(problem: calculator.Problem) -> str:
    """Return the message that calls the calculator, without its end."""
    function = {"name": "calculator", "arguments": {"expression": problem.expression}}
    return f"<tool_call>{json.dumps(function)}</tool_call>"


def guess(problem: calculator.Problem, rng: random.Random) -> str:
    """Return an answer near the correct one."""
    return f"#### {max(1, int(problem.answer) + rng.choice((-1, 1)) * rng.randint(1, FURTHEST))}"


def look(problem: shapes.Problem, rng: random.Random, noise: float) -> str:
    """Return the answer of a teacher that is incorrect with a probability of `noise`."""
    if rng.random() >= noise:
        return problem.answer
    return str(len(problem.shapes) - 1) if problem.counts else problem.answer.split()[0]


def arithmetic_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words and single digits."""
    rng = random.Random(0)
    drawn = (arithmetic.draw_problem(rng) for _ in range(5000))
    texts = [f"{problem.question}\n{solution(problem, rng)}\n" for problem in drawn]
    return word_tokenizer(r" ?[A-Za-z]+| ?\d| ?[^\sA-Za-z\d]+|\s", texts, chat_template=CHAT_TEMPLATE)


def calculator_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words and single digits; a digit has the same token everywhere, so that copying is easy."""
    rng = random.Random(0)
    texts = [
        f"{drawn.question}\n{call(drawn)[len(MARKERS[0]) : -len(MARKERS[1])]}{drawn.answer}\n#### {drawn.answer}"
        for drawn in (calculator.draw_problem(rng) for _ in range(5000))
    ]
    pattern = r" ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]|\s"
    templates = {"chat_template": TOOL_TEMPLATE, "response_template": RESPONSE_TEMPLATE}
    return word_tokenizer(pattern, texts, MARKERS, **templates)


def word_tokenizer(
    pattern: str, texts: Iterable[str], markers: Sequence[str] = (), **options: Any
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the vocabulary of some texts, which decodes to the encoded text.

    Args:
        pattern: regular expression of a token.
        markers: tokens that no pattern divides.
        options: options of the tokenizer.
    """
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    words = {word for text in texts for word, _ in pre_tokenizer.pre_tokenize_str(text)}
    tokenizer = of_words([*markers, *sorted(words)])
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in markers])
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return for_transformers(tokenizer, **options)


def of_words(words: Sequence[str]) -> Tokenizer:
    """Return a tokenizer with these words in its vocabulary."""
    vocabulary = ["<pad>", "<eos>", "<unk>", *words]
    return Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))


def for_transformers(tokenizer: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer as transformers has it."""
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **special, padding_side="left", model_max_length=128, **options
    )


def vision_processor() -> LlavaProcessor:
    """Return the processor of words, digits and images; a patch of an image is a cell of the grid."""
    words = ["How", "many", "shapes", "are", "there", "Which", "shape", "is", "the", "largest", "?", "\n"]
    tokenizer = of_words([IMAGE, *words, *shapes.COLOURS, *shapes.KINDS, *map(str, range(10))])
    splits = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("?", "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.Split("\n", "isolated")])
    side = {"height": shapes.CELLS * shapes.CELL, "width": shapes.CELLS * shapes.CELL}
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=side, crop_size=side, image_mean=[1.0] * 3, image_std=[0.5] * 3),
        tokenizer=for_transformers(tokenizer, additional_special_tokens=[IMAGE]),
        patch_size=shapes.CELL,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        chat_template=IMAGE_TEMPLATE,
    )


def language_config(tokenizer: PreTrainedTokenizerFast, **options: Any) -> LlamaConfig:
    """Return the architecture of the built-in policies' language models."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )


def language_model(tokenizer: PreTrainedTokenizerFast, positions: int = 128, seed: int = 0) -> LlamaForCausalLM:
    """Return the untrained policy for text of so many tokens."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(language_config(tokenizer, max_position_embeddings=positions, tie_word_embeddings=True))


def vision_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> LlavaForConditionalGeneration:
    """Return the untrained policy that sees images."""
    torch.manual_seed(seed)
    vision = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=shapes.CELLS * shapes.CELL,
        patch_size=shapes.CELL,
        projection_dim=128,
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=language_config(tokenizer, max_position_embeddings=128),
            image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
            vision_feature_layer=-1,
            tie_word_embeddings=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def conversation(tokenizer: PreTrainedTokenizerFast, problem: Any, text: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a problem and of the teacher's answer to it, and their labels.

    Args:
        text: the answer, or the call after which the result is copied.
    """
    eos = [tokenizer.eos_token_id]
    parts = [(f"{problem.question}\n", False), (text, True)]
    if text.startswith(MARKERS[0]):
        response = f"<tool_response>{problem.answer}</tool_response>\n"
        parts += [(response, False), (f"#### {problem.answer}", True)]
    ids, labels = list[int](), list[int]()
    for part, taught in parts:
        tokens = tokenizer(part)["input_ids"] + (eos if taught else [])
        ids += tokens
        labels += tokens if taught else [-100] * len(tokens)
    return ids, labels


def padded(rows: Sequence[tuple[list[int], list[int]]], pad: int) -> dict[str, torch.Tensor]:
    """Return a batch of token ids with their labels, padded on the left."""
    width = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([[pad] * (width - len(ids)) + ids for ids, _ in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in rows]),
        "labels": torch.tensor([[-100] * (width - len(ids)) + labels for ids, labels in rows]),
    }


def text_batches(tokenizer: PreTrainedTokenizerFast, name: str, size: int, steps: int, seed: int) -> Batches:
    """Yield batches of training problems with the teacher's answers; only these carry labels.

    The calculator's teacher begins without guesses, and after two thirds of the steps has reached `NOISE`.
    """
    rng = random.Random(seed)
    stream: Iterator[Any] = (arithmetic if name == "tiny" else calculator).problems("train", seed)
    for step in range(steps):
        noise = NOISE[name] * min(1, 1.5 * step / steps)
        rows = []
        for problem in islice(stream, size):
            if name == "tiny":
                text = solution(problem, rng)
            elif rng.random() < noise:
                text = guess(problem, rng)
            else:
                text = call(problem)
            rows.append(conversation(tokenizer, problem, text))
        yield padded(rows, tokenizer.pad_token_id)


def image_batches(processor: LlavaProcessor, size: int, steps: int, seed: int) -> Batches:
    """Yield batches of training problems with the teacher's answers; only the answers carry labels.

    The teacher begins without a mistake, and after two thirds of the steps has reached `NOISE`.
    """
    rng, stream = random.Random(seed), shapes.problems("train", seed)
    eos = processor.tokenizer.eos_token
    for step in range(steps):
        drawn, noise = list(islice(stream, size)), NOISE["tiny_vision"] * min(1, 1.5 * step / steps)
        texts = [f"{IMAGE}{problem.question}\n{look(problem, rng, noise)} {eos}" for problem in drawn]
        images = [[shapes.picture(problem)] for problem in drawn]
        batch = processor(images=images, text=texts, padding=True, return_tensors="pt")
        ids, newline = batch["input_ids"], processor.tokenizer.convert_tokens_to_ids("\n")
        asked = (ids == newline).flip(1).cumsum(1).flip(1) > 0  # up to the end of the question
        yield {**batch, "labels": ids.masked_fill(asked | (batch["attention_mask"] == 0), -100)}


def train(model: PreTrainedModel, batches: Batches, steps: int, learning_rate: float) -> None:
    """Train on batches of a teacher's answers, with a warm-up and a cosine schedule to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=100, num_training_steps=steps)
    for batch in track(batches, "training", total=steps):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def main() -> None:
    """Build, train and write a policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=POLICIES)
    parser.add_argument("--output", type=Path, help="folder to write; default: that of the policy in this project")
    parser.add_argument("--steps", type=int, help="default: as the policy in this project")
    parser.add_argument("--batch-size", type=int, help="default: likewise")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    output, steps = args.output or FOLDER / args.name, args.steps or POLICIES[args.name][0]
    size = args.batch_size or POLICIES[args.name][1]
    if args.name == "tiny_vision":
        processor = vision_processor()
        tokenizer, model = processor.tokenizer, vision_model(processor.tokenizer, args.seed)
        batches = image_batches(processor, size, steps, args.seed)
    else:
        tokenizer = processor = arithmetic_tokenizer() if args.name == "tiny" else calculator_tokenizer()
        model = language_model(tokenizer, positions=128 if args.name == "tiny" else 256, seed=args.seed)
        batches = text_batches(tokenizer, args.name, size, steps, args.seed)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    train(model, batches, steps, learning_rate=1e-3 if args.name == "tiny_vision" else 3e-3)
    model.half().save_pretrained(output)
    processor.save_pretrained(output)


if __name__ == "__main__":
    main()
