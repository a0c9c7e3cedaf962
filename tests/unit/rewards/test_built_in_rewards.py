"""The rewards of format and length, and the files of all built-in rewards."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from grpo.config.schema import ROOT
from rewards.brevity import brevity
from rewards.concise import concise
from rewards.format import format
from rewards.overlong import overlong
from rewards.repetition import repetition
from rewards.xml_format import xml_format

SHIPPED = sorted(path.stem for path in (ROOT / "conf" / "reward").glob("*.yaml"))
ALPHABET = st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "a", " ", "\n"]), max_size=12)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_rewards_file_function_and_choice_share_one_name(name: str) -> None:
    assert list(OmegaConf.load(ROOT / "conf" / "reward" / f"{name}.yaml")) == [name]
    text = (ROOT / "rewards" / f"{name}.py").read_text()
    assert f"def {name}(" in text
    assert text.count("\n") < 60


def test_format_searches_for_a_pattern_over_lines() -> None:
    assert format(["a\nb #### 5", "#### 5 b", [{"content": "#### 5"}]], r"a.*####|\A#### 5\Z") == [1, 0, 1]


def test_a_pattern_of_ones_own_that_is_broken_says_so() -> None:
    with pytest.raises(Exception, match="unterminated"):
        format(["a"], "(")


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>because</think>\n<answer>5</answer>", 1.0),
        (" <think>a</think><answer>5</answer>\n", 1.0),
        ("<think>a</think> so <answer>5</answer>", 0.5),
        ("<answer>5</answer><think>a</think>", 0.5),
        ("a</think>\n<answer>5</answer>", 1.0),
        ("</think><answer>5</answer>", 0.25),
        ("a <answer>5</answer>", 0.25),
        ("<think>a</think>", 0.25),
        ("<think></think><answer></answer>", 0.0),
        ("<think>a</think><answer>5</answer><answer>6</answer>", 0.25),
        ("<think>a<answer>5</answer></think>", 0.5),
        ("5", 0.0),
    ],
)
def test_xml_format_rewards_the_format_and_partial_success(completion: str, reward: float) -> None:
    assert xml_format([completion]) == [reward]


@given(ALPHABET)
def test_only_the_complete_format_earns_the_full_reward(parts: list[str]) -> None:
    text = "".join(parts)
    (reward,) = xml_format([text])
    assert 0 <= reward <= 1
    if reward == 1:
        inner = text.strip().removeprefix("<think>").removesuffix("</answer>")
        thought, _, answer = inner.partition("</think>")
        assert thought.strip()
        assert answer.strip().removeprefix("<answer>").strip()


def test_brevity_is_full_up_to_enough_and_falls_to_the_limit() -> None:
    ids = [[1] * length for length in (1, 10, 15, 20, 30)]
    assert brevity(["a"] * 5, ids, enough=10, limit=20) == [1, 1, 0.5, 0, 0]
    assert brevity(["", " \n"], [[], [1]], enough=10, limit=20) == [0, 0]


def test_brevity_refuses_limits_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="enough=20, limit=20"):
        brevity(["a"], [[1]], enough=20, limit=20)


GRADER = {"fn": "rewards.correctness.correctness", "kwargs": {"find": ["hash"]}}


def test_concise_takes_an_async_grader() -> None:
    grader = {"fn": f"{__name__}.always_correct"} if "." in __name__ else {"fn": f"{__file__}:always_correct"}
    assert concise(["1", "1"], [[1], [1, 2]], [0, 0], grader)[0] > 0.5


async def always_correct(completions: list[str], **columns: object) -> list[float]:
    return [1.0] * len(completions)


def test_concise_is_the_reward_of_its_paper_up_to_a_factor() -> None:
    completions = ["#### 1", "#### 1", "#### 1", "#### 2", "#### 1", "#### 2", "#### 1", "#### 1"]
    lengths, weight = [10, 20, 60, 5, 7, 7, 30, 30], 0.25
    groups = [0, 0, 0, 0, 1, 1, 2, 2]
    given = concise(completions, [[1] * n for n in lengths], groups, GRADER, answer=["1"] * 8)
    total = [(text == "#### 1") + weight * reward for text, reward in zip(completions, given, strict=True)]
    alpha = weight / (1 + weight)
    z = (np.array([10, 20, 60]) - 30) / np.std([10, 20, 60])
    paper = [*(1 - alpha / (1 + np.exp(-z))), 0, 1 - alpha / 2, 0, 1 - alpha / 2, 1 - alpha / 2]
    assert total == pytest.approx([(1 + weight) * value for value in paper])


@given(st.lists(st.integers(0, 3), max_size=40), st.floats(0, 0.9))
def test_repetition_is_between_minus_one_and_zero(ids: list[int], free: float) -> None:
    (reward,) = repetition(["a"], [ids], ngram_size=2, free=free)
    assert -1 <= reward <= 0


def test_repetition_punishes_what_has_been_said_and_nothing_else() -> None:
    assert repetition(["a"] * 2, [list(range(100)), [1] * 104], ngram_size=4, free=0.2) == [
        0,
        pytest.approx(-0.9876, abs=1e-3),
    ]


def test_overlong_punishes_the_last_tokens_before_the_limit() -> None:
    ids = [[1] * length for length in (80, 90, 100, 120)]
    assert overlong(["a"] * 4, ids, max_completion_length=100) == [0, -0.5, -1, -1]
    assert overlong(["a"] * 4, ids, max_completion_length=100, cache=10) == [0, 0, -1, -1]
