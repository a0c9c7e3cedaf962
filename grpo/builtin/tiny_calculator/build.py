"""Build the built-in policy with a tool: `python -m grpo.builtin.tiny_calculator.build`, 15 minutes on two cores.

A Llama of one million parameters learns word problems from a noisy teacher: in three cases of ten the teacher calls the
calculator and copies its result, in the others the teacher writes a guess. The resulting policy copies numbers, words
and results well, cannot calculate, and mostly does not ask; reinforcement learning can teach it to.
"""

import argparse
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from grpo.builtin.tasks.calculator import Problem, draw_problem, problems
from grpo.builtin.tiny.build import language_config, padded, train, word_tokenizer

NOISE = 0.7
"""Probability that the teacher guesses."""
FURTHEST = 99
"""Largest distance of a guess from the answer; a guess is never correct."""
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if message['role'] == 'tool' %}{{ '<tool_response>' + message['content'] | string + '</tool_response>\n' }}
{%- elif message['role'] == 'assistant' %}{{ message['content'] }}
{%- for call in message['tool_calls'] or [] %}
{{- '<tool_call>' + call['function'] | tojson + '</tool_call>' }}
{%- endfor %}{{ eos_token }}
{%- else %}{{ message['content'] + '\n' }}{% endif %}{% endfor %}"""
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


def call(problem: Problem) -> str:
    """Return the message that calls the calculator, without its end."""
    function = {"name": "calculator", "arguments": {"expression": problem.expression}}
    return f"<tool_call>{json.dumps(function)}</tool_call>"


def guess(problem: Problem, rng: random.Random) -> str:
    """Return an answer near the correct one."""
    return f"#### {max(1, int(problem.answer) + rng.choice((-1, 1)) * rng.randint(1, FURTHEST))}"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words and single digits, the same ones everywhere, so that copying is easy."""
    rng = random.Random(0)
    texts = [
        f"{one.question}\n{call(one)[len(MARKERS[0]) : -len(MARKERS[1])]}{one.answer}\n#### {one.answer}"
        for one in (draw_problem(rng) for _ in range(5000))
    ]
    pattern = r" ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]|\s"
    templates = {"chat_template": CHAT_TEMPLATE, "response_template": RESPONSE_TEMPLATE}
    return word_tokenizer(pattern, texts, MARKERS, **templates)


def conversation(tokenizer: PreTrainedTokenizerFast, problem: Problem, text: str) -> tuple[list[int], list[int]]:
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


def batches(tokenizer: PreTrainedTokenizerFast, size: int, steps: int, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield `steps` batches of `size` training problems with the teacher's answers; only these carry labels.

    The teacher begins without guesses, and after two thirds of the steps has reached `NOISE`.
    """
    rng, stream = random.Random(seed), problems("train", seed)
    for step in range(steps):
        noise = NOISE * min(1, 1.5 * step / steps)
        rows = [
            conversation(tokenizer, one, guess(one, rng) if rng.random() < noise else call(one))
            for one in islice(stream, size)
        ]
        yield padded(rows, tokenizer.pad_token_id)


def main() -> None:
    """Build, train and write the policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder to write")
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = make_tokenizer()
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(language_config(tokenizer, max_position_embeddings=256, tie_word_embeddings=True))
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens")
    train(model, batches(tokenizer, args.batch_size, args.steps, args.seed), args.steps)
    model.half().save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
