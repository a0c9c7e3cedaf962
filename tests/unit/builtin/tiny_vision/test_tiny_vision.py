import random
from itertools import islice
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import grpo.builtin.tiny_vision
from grpo.builtin.tasks.shapes import COLOURS, KINDS, Problem, picture, problems
from grpo.extras.builtin_policies.build import NOISE, look, vision_model, vision_processor
from grpo.generation.transformers.completer import Completer

SHIPPED = Path(grpo.builtin.tiny_vision.__file__).parent


def test_the_script_makes_the_shipped_architecture_and_processor(tmp_path: Path) -> None:
    processor = vision_processor()
    built, shipped = vision_model(processor.tokenizer, 0), AutoModelForImageTextToText.from_pretrained(SHIPPED)
    assert {n: p.shape for n, p in built.named_parameters()} == {n: p.shape for n, p in shipped.named_parameters()}
    processor.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja", "processor_config.json"):
        assert (tmp_path / name).read_text() == (SHIPPED / name).read_text()


def test_the_shipped_policy_is_small_and_safe() -> None:
    files = [path for path in SHIPPED.iterdir() if path.is_file() and path.suffix not in (".py", ".pyc")]
    assert sum(path.stat().st_size for path in files) <= 6_000_000
    assert {path.suffix for path in files} == {".json", ".jinja", ".safetensors"}


def test_the_teacher_errs_as_often_as_it_should_in_known_words() -> None:
    draw, tokenizer = random.Random(0), vision_processor().tokenizer
    drawn = list(islice(problems("train"), 1000))
    answers = [look(problem, draw, NOISE["tiny_vision"]) for problem in drawn]
    wrong = sum(answer != problem.answer for answer, problem in zip(answers, drawn, strict=True))
    assert wrong == pytest.approx(1000 * NOISE["tiny_vision"], abs=50)
    texts = [f"{problem.question}\n{answer}" for problem, answer in zip(drawn, answers, strict=True)]
    assert not any(tokenizer.unk_token_id in ids for ids in tokenizer(texts)["input_ids"])


@pytest.mark.parametrize("blank", [False, True])
def test_the_policy_looks_and_mostly_answers_incorrectly(blank: bool) -> None:
    """Its greedy answers are what the teacher sees; of white pictures they are no better than chance."""
    model, processor = AutoModelForImageTextToText.from_pretrained(SHIPPED), AutoProcessor.from_pretrained(SHIPPED)
    asked = list(islice(problems("test", 7), 200))

    def prompt(problem: Problem) -> list:
        image = Image.new("RGB", (96, 96), "white") if blank else picture(problem)
        parts = [{"type": "image", "image": image}, {"type": "text", "text": problem.question}]
        return [{"role": "user", "content": parts}]

    with torch.no_grad():
        answers = Completer(model.float().eval(), processor, 8)([prompt(problem) for problem in asked])
    seen = [
        answer.strip() == look(problem, random.Random(0), noise=1.0)
        for answer, problem in zip(answers, asked, strict=True)
    ]
    correct = [answer.strip() == problem.answer for answer, problem in zip(answers, asked, strict=True)]
    if blank:
        assert sum(seen) / 200 < 0.3
    else:
        assert sum(seen) / 200 > 0.9
        assert sum(correct) / 200 < 0.3
        named = [answer.split() for answer, problem in zip(answers, asked, strict=True) if not problem.counts]
        assert all(words[0] in COLOURS and set(words[1:]) <= set(KINDS) for words in named)
