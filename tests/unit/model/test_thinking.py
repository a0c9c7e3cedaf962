"""`task.thinking` reaches the chat template under the template's own name, or is refused in one line."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig
from transformers import AutoTokenizer

from grpo.config.check import check
from grpo.config.schema import ROOT
from grpo.model.policy import load_processing_class
from grpo.model.thinking import KEY, named_as_in, template_of
from grpo.utils.errors import ConfigError

QWEN = "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
GPT_OSS = "Reasoning: {{ reasoning_effort }}"
CONVERSATION = ("task.conversational=true", "task.prompt='{question}'")


@pytest.mark.parametrize(
    ("template", "thinking", "expected"),
    [
        (QWEN, False, {"enable_thinking": False}),
        (GPT_OSS, "low", {"reasoning_effort": "low"}),
        ("{% if thinking %}<think>{% endif %}", True, {"thinking": True}),
        (QWEN + GPT_OSS, "high", {"reasoning_effort": "high"}),
        (QWEN + GPT_OSS, True, {"enable_thinking": True}),
        ("{{ messages }}", False, {}),
        (
            "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{% generation %}{% endgeneration %}",
            False,
            {"thinking": False},
        ),
    ],
)
def test_each_template_gets_its_own_argument(template: str, thinking: Any, expected: dict[str, Any]) -> None:
    assert named_as_in(template, {KEY: thinking, "other": 1}, "name") == {"other": 1, **expected}


@pytest.mark.parametrize(
    ("template", "thinking", "message"),
    [
        (
            None,
            True,
            "task.thinking=true: the chat template of name has none of enable_thinking, thinking, reasoning_e",
        ),
        (QWEN, "low", r"task.thinking=low: the chat template of name takes true or false \(enable_thinking\)"),
        ("thinking {# thinking #}{{ message.thinking }}{{ 'thinking' }}", True, "has none of"),
        (GPT_OSS, False, r"task.thinking=false: the chat template of name takes low, medium or high \(reasoning_eff"),
    ],
)
def test_what_a_template_cannot_take_is_refused(template: str | None, thinking: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        named_as_in(template, {KEY: thinking}, "name")


def test_arguments_of_the_user_are_the_users_own() -> None:
    assert named_as_in(QWEN, {"thinking": 1, "enable_thinking": False}, "name") == {
        "thinking": 1,
        "enable_thinking": False,
    }
    with pytest.raises(ConfigError, match="chat_template_kwargs has enable_thinking: leave it out there"):
        named_as_in(QWEN, {"enable_thinking": False, KEY: True}, "name")
    assert named_as_in({"default": "", "tool_use": QWEN}, {KEY: True}, "name") == {"enable_thinking": True}


def test_prompts_are_built_as_the_task_says(composed: Callable[..., DictConfig], tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "grpo" / "builtin" / "tiny", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ messages[0].content }}" + QWEN
    tokenizer.save_pretrained(folder)
    for thinking, end in (("false", "<think></think>"), ("true", "")):
        config = composed(f"model.model_name_or_path={folder}", *CONVERSATION, f"task.thinking={thinking}")
        check(config)
        loaded = load_processing_class(config.model, template=template_of(config))
        assert (
            loaded.apply_chat_template([{"role": "user", "content": "How many?"}], tokenize=False) == f"How many?{end}"
        )
    assert template_of(composed(*CONVERSATION)) == {}
    assert template_of(composed("train.chat_template_kwargs={a: 1}", "task.thinking=low")) == {"a": 1, KEY: "low"}


def test_presets_of_models_that_think_let_them_answer_at_once(composed: Callable[..., DictConfig]) -> None:
    for name in ("qwen3_0_6b", "qwen3_5_4b", "qwen3_6_27b", "smollm3_3b"):
        assert template_of(composed(f"model={name}", "task=gsm8k")) == {KEY: False}
        assert template_of(composed(f"model={name}", "task=gsm8k", "task.thinking=null")) == {}
    assert template_of(composed("+gpu=rtx3090", "task.thinking=true")) == {KEY: True}
    plain = composed("model=qwen3_0_6b")
    check(plain)
    assert template_of(plain) == {}, "plain prompts have no template"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (("task.thinking=maybe", *CONVERSATION), "task.thinking=maybe: give true, false, low, medium, high or null"),
        (
            ("task.thinking=true",),
            "task.thinking=true: an argument of the chat template, which plain prompts do not have",
        ),
    ],
)
def test_values_and_plain_prompts_are_refused(
    typed: tuple[str, ...], message: str, composed: Callable[..., DictConfig]
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(composed(*typed))
