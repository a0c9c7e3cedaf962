"""The built-in policy with a tool, as its folder has it: it copies, and mostly does not ask."""

import random
from itertools import islice

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.chat_template_utils import is_chat_template_prefix_preserving, parse_response, supports_tool_calling

from grpo.builtin.tasks.calculator import problems
from grpo.config.schema import ROOT
from grpo.extras.builtin_policies.build import MARKERS, calculator_tokenizer, call, conversation, guess

FOLDER = ROOT / "grpo" / "builtin" / "tiny_calculator"
SOME = list(islice(problems("test", seed=5), 64))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


def test_the_tokenizer_is_the_one_that_is_built(tokenizer):
    built = calculator_tokenizer()
    assert tokenizer.get_vocab() == built.get_vocab()
    assert tokenizer.chat_template == built.chat_template
    assert tokenizer.response_template == built.response_template


def test_its_chat_template_renders_tool_calls_as_they_are_taught(tokenizer):
    assert supports_tool_calling(tokenizer)
    assert is_chat_template_prefix_preserving(tokenizer)
    for problem in SOME:
        ids, labels = conversation(tokenizer, problem, call(problem))
        asked = tokenizer(f"{problem.question}\n")["input_ids"]
        end = ids.index(tokenizer.eos_token_id) + 1
        message = parse_response(tokenizer, ids[len(asked) : end], prefix=asked)
        assert message["tool_calls"][0]["function"]["arguments"] == {"expression": problem.expression}
        messages = [{"role": "user", "content": problem.question}, message]
        messages += [{"role": "tool", "content": problem.answer}]
        messages += [{"role": "assistant", "content": f"#### {problem.answer}"}]
        assert tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False) == ids
        assert tokenizer.unk_token_id not in ids
        taught = tokenizer.decode([token for token in labels if token != -100])
        assert taught == f"{call(problem)}<eos>#### {problem.answer}<eos>"


def test_a_guess_is_never_correct():
    rng = random.Random(0)
    assert all(guess(problem, rng) != f"#### {problem.answer}" for problem in SOME)


@pytest.mark.slow
def test_the_policy_rarely_calls_the_tool_and_then_copies_well(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    called, copied = 0, 0
    for problem in SOME:
        asked = tokenizer(f"{problem.question}\n", return_tensors="pt")["input_ids"]
        called += tokenizer.decode(model.generate(asked, max_new_tokens=1, do_sample=False)[0, -1]) == MARKERS[0]
        ids, _ = conversation(tokenizer, problem, call(problem))
        begun = torch.tensor([ids[: asked.size(1) + 1]])
        written = model.generate(begun, max_new_tokens=45, do_sample=False)[0, asked.size(1) :]
        copied += tokenizer.decode(written) == f"{call(problem)}<eos>"
    assert called <= 3
    assert copied >= 58
