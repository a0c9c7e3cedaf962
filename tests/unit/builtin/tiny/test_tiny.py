import json
import random
from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo.builtin.tiny
from grpo.builtin.tasks.arithmetic import Problem, calculate, problems
from grpo.config.schema import ROOT
from grpo.extras.builtin_policies.build import MISTAKES, arithmetic_tokenizer, language_model, solution
from rewards.correctness import correctness

SHIPPED = Path(grpo.builtin.tiny.__file__).parent


def test_the_script_makes_the_shipped_architecture() -> None:
    built, shipped = language_model(arithmetic_tokenizer()), AutoModelForCausalLM.from_pretrained(SHIPPED)
    assert {n: p.shape for n, p in built.named_parameters()} == {n: p.shape for n, p in shipped.named_parameters()}
    kept = [
        key
        for key in built.config.to_dict()
        if key not in ("_name_or_path", "dtype", "architectures", "transformers_version")
    ]
    assert {key: getattr(built.config, key, None) for key in kept} == {
        key: getattr(shipped.config, key, None) for key in kept
    }


def test_the_script_makes_the_shipped_tokenizer(tmp_path: Path) -> None:
    arithmetic_tokenizer().save_pretrained(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (SHIPPED / name).read_text()
    built, shipped = (json.loads((path / "tokenizer_config.json").read_text()) for path in (tmp_path, SHIPPED))
    assert built == shipped


def test_the_shipped_policy_is_small_and_safe() -> None:
    files = [path for path in SHIPPED.iterdir() if path.suffix not in (".py", ".pyc")]
    assert sum(path.stat().st_size for path in files if path.is_file()) <= 2_000_000
    assert {path.suffix for path in files if path.is_file()} == {".json", ".jinja", ".safetensors"}


def test_the_tokenizer_decodes_to_the_encoded_text() -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    rng = random.Random(0)
    for problem in islice(problems("test", 3), 200):
        text = f"{problem.question}\n{solution(problem, rng)}"
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids


def test_the_longest_solution_fits_the_completion() -> None:
    from omegaconf import OmegaConf

    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    limit = OmegaConf.load(ROOT / "conf" / "task" / "arithmetic.yaml").train.max_completion_length
    longest = Problem("", 44, (("+", 40), ("-", 40)))
    rng = random.Random(0)
    assert len(tokenizer(solution(longest, rng, noise=0))["input_ids"]) + 1 <= limit
    for problem in islice(problems("train", 4), 500):
        assert len(tokenizer(solution(problem, rng))["input_ids"]) + 1 <= limit


def test_a_noisy_teacher_still_calculates_correctly() -> None:
    rng = random.Random(0)
    for problem in islice(problems("train", 5), 200):
        assert correctness([solution(problem, rng, noise=0)], [str(problem.answer)]) == [1]
        for line in solution(problem, rng, noise=1).splitlines()[:-1]:
            left, result = line.split(" = ")
            value, operation, number = left.split()
            assert calculate(int(value), operation, int(number)) == int(result)


@pytest.mark.parametrize("operation", MISTAKES)
def test_a_mistake_is_another_operation(operation: str) -> None:
    assert MISTAKES[operation] != operation
