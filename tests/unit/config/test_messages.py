"""What a message says to type, typed in a shell."""

import subprocess
from collections.abc import Callable

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from grpo.config.check import check
from grpo.config.messages import REMOVED, elsewhere, explain, to_paste
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
