"""What a message says to type, typed in a shell."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from yaml import MarkedYAMLError

from grpo.config.check import check
from grpo.config.messages import REMOVED, check_flags, elsewhere, explain, of_yaml, to_paste
from grpo.utils.errors import ConfigError

VALUES = [
    "{q}",
    "What is {q}?",
    "{q}: {c}",
    "train[200:]",
    "Think, then answer.",
    r"####\s*(.*)",
    r"\boxed{(.*)}",
    "it's {q}",
    'say "{q}"',
    """it's "{q}" for $5 or `more`!""",
    "{q}\nIt's \\n.",
]


@pytest.mark.parametrize("value", VALUES)
def test_what_is_printed_can_be_pasted(value: str) -> None:
    line = to_paste(f"+task.prompt={value}")
    assert line is not None
    assert "\n" not in line
    word = subprocess.run(["bash", "-c", f"printf %s {line}"], capture_output=True, text=True, check=True).stdout
    override = OverridesParser.create().parse_override(word)
    assert (override.input_line.partition("=")[0], override.value()) == ("+task.prompt", value)


def test_plain_values_are_printed_as_the_documentation_has_them() -> None:
    assert to_paste("task.prompt={q}") == "\"task.prompt='{q}'\""
    assert to_paste("train.num_generations") is None


def test_a_key_of_another_group_is_found_there(composed: Callable[..., DictConfig]) -> None:
    assert composed()
    assert elsewhere("attn_implementation") == ["model.attn_implementation"]
    assert elsewhere("temperature") == ["train.temperature", "evaluate.temperature"]
    assert elsewhere("dynamic_sampling") == ["rollout.dynamic_sampling"]
    assert elsewhere("nothing") == []


@pytest.mark.parametrize("key", REMOVED)
def test_a_removed_key_says_since_when_and_what_is_left(composed: Callable[..., DictConfig], key: str) -> None:
    with pytest.raises(HydraException) as of_hydra:
        composed(f"{key}=0.5")
    line = explain(of_hydra.value)
    assert line.startswith(f"{key}: removed in 0.")
    assert "\n" not in line
    for plus in ("+", "++"):
        with pytest.raises(ConfigError) as error:
            check(composed(f"{plus}{key}=null"))
        assert str(error.value) == line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train:\n  learnig_rate: 1\n", "experiment/mine.yaml: learnig_rate: no such key; did you mean learning_rate?"),
        ("rollout:\n  staleness: 1\n", "experiment/mine.yaml: staleness: no such key; did you mean engine.staleness?"),
        ("trian:\n  max_steps: 1\n", "experiment/mine.yaml: trian: no such key; did you mean train?"),
        ("task:\n  answer:\n    patern: x\n", "experiment/mine.yaml: patern: no such key"),
        ("train:\n\tmax_steps: 1\n", "{folder}/experiment/mine.yaml, line 3: a tab; YAML is indented by spaces"),
        ("train: {a: [1}\n", "{folder}/experiment/mine.yaml, line 2: expected ',' or ']', but got '}'"),
    ],
)
def test_a_yaml_of_ones_own_is_named_with_its_mistake(
    tmp_path: Path, composed: Callable[..., DictConfig], text: str, line: str
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}")
    with pytest.raises((HydraException, MarkedYAMLError)) as error:
        composed(f"hydra.searchpath=[file://{tmp_path}]", "+experiment=mine")
    explained = of_yaml(error.value) if isinstance(error.value, MarkedYAMLError) else explain(error.value)
    assert explained == line.replace("{folder}", str(tmp_path))


def test_an_option_in_trls_form_is_named_by_its_key(composed: Callable[..., DictConfig]) -> None:
    composed()  # registers the schema
    check_flags(["--config-dir", "x", "--multirun", "train.learning_rate=1e-5", "--learning_rat"])
    for word in ("--learning_rate", "--learning-rate=1e-5"):
        with pytest.raises(
            ConfigError, match=rf"{word}: write train.learning_rate=…; python -m grpo.from_trl converts"
        ):
            check_flags([word, "1e-5"])


def test_a_reward_without_its_name_is_explained(composed: Callable[..., DictConfig]) -> None:
    with pytest.raises(ConfigError, match=r"reward.fn=mine.py:f: the keys of a reward stand below its name"):
        check(composed("+reward.fn=mine.py:f"))
