"""Build the built-in policy: `python -m grpo.builtin.tiny.build`.

A Llama of one million parameters learns word problems from a noisy teacher: every calculation of the teacher is
correct, but in six steps of ten the operation is not the one that the words ask for. The resulting policy computes
correctly and usually picks an incorrect operation, which reinforcement learning can improve.
"""

import argparse
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

from grpo.builtin.tasks.arithmetic import Problem, calculate, draw_problem, problems

NOISE = 0.6
"""Probability that the teacher takes an incorrect operation in a step."""
MISTAKES = {"+": "-", "-": "+", "*": "+", "/": "-"}
"""Operation that the noisy teacher takes in place of each."""
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def solution(problem: Problem, rng: random.Random, noise: float = NOISE) -> str:
    """Return the teacher's solution: a line per calculation, then the answer after `####` as in GSM8K."""
    lines, value = [], problem.start
    for operation, number in problem.steps:
        mistake = MISTAKES[operation]
        if rng.random() < noise and calculate(value, mistake, number):
            operation = mistake
        result = calculate(value, operation, number)
        if not result:
            break
        lines.append(f"{value} {operation} {number} = {result}")
        value = result
    return "\n".join([*lines, f"#### {value}"])


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words and single digits."""
    rng = random.Random(0)
    texts = [f"{drawn.question}\n{solution(drawn, rng)}\n" for drawn in (draw_problem(rng) for _ in range(5000))]
    return word_tokenizer(r" ?[A-Za-z]+| ?\d| ?[^\sA-Za-z\d]+|\s", texts, chat_template=CHAT_TEMPLATE)


def word_tokenizer(
    pattern: str, texts: Iterable[str], markers: Sequence[str] = (), **options: Any
) -> PreTrainedTokenizerFast:
    """Return a tokenizer that decodes to the encoded text, whose vocabulary is that of some texts.

    Args:
        pattern: regular expression of a token.
        markers: tokens that no pattern divides.
        options: of the tokenizer.
    """
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    words = {word for text in texts for word, _ in pre_tokenizer.pre_tokenize_str(text)}
    vocabulary = ["<pad>", "<eos>", "<unk>", *markers, *sorted(words)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in markers])
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=128,
        **options,
    )


def language_config(
    tokenizer: PreTrainedTokenizerFast, max_position_embeddings: int = 128, **options: Any
) -> LlamaConfig:
    """Return the architecture of the built-in policies' language models."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=max_position_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Return the untrained policy."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(language_config(tokenizer, tie_word_embeddings=True))


def batches(tokenizer: PreTrainedTokenizerFast, size: int, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of `size` training problems with the teacher's solutions; only the solutions carry labels."""
    rng = random.Random(seed)
    stream = problems("train", seed)
    while True:
        rows = []
        for drawn in islice(stream, size):
            prompt = tokenizer(drawn.question + "\n")["input_ids"]
            target = tokenizer(solution(drawn, rng))["input_ids"] + [tokenizer.eos_token_id]
            rows.append((prompt + target, [-100] * len(prompt) + target))
        yield padded(rows, tokenizer.pad_token_id)


def padded(rows: Sequence[tuple[list[int], list[int]]], pad: int) -> dict[str, torch.Tensor]:
    """Return a batch of token ids with their labels, padded on the left."""
    width = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([[pad] * (width - len(ids)) + ids for ids, _ in rows]),
        "attention_mask": torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in rows]),
        "labels": torch.tensor([[-100] * (width - len(ids)) + labels for ids, labels in rows]),
    }


def train(
    model: PreTrainedModel, batches: Iterator[dict[str, torch.Tensor]], steps: int, learning_rate: float = 3e-3
) -> None:
    """Train on batches of a teacher's solutions, with a warm-up and a cosine schedule to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=100, num_training_steps=steps)
    for batch in track(islice(batches, steps), "training", total=steps):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def main() -> None:
    """Build, train and write the policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder to write")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, args.seed)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    train(model, batches(tokenizer, args.batch_size, args.seed), args.steps)
    model.half().save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
