"""Tokens that a model has no embedding or no position for."""

import json
import shutil
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer, GPT2Config

from grpo.config.schema import ROOT
from grpo.data.limits import check_limits, check_tokens
from grpo.utils.errors import ConfigError

TINY = ROOT / "grpo" / "builtin" / "tiny"
PROBLEMS = Dataset.from_dict({"prompt": ["Tom has 2 pens .", "Tom has 2 pens . He loses 1 ."]})


def test_a_token_that_is_used_needs_an_embedding() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    rows = len(tokenizer)
    tokenizer.add_tokens(["<unused>"])
    check_tokens(rows, tokenizer, ["Tom"])  # as the token for images in the tokenizer of a model of text alone
    with pytest.raises(ConfigError, match=rf"the token <unused> \({rows}\), and the model {rows} embeddings"):
        check_tokens(rows, tokenizer, ["Tom", [{"role": "user", "content": "a <unused> token"}]])
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    with pytest.raises(ConfigError, match=r"the token \[PAD\] .* do not belong together"):
        check_tokens(rows, tokenizer, ["Tom"])


def test_learned_positions_end_and_rotary_ones_are_warned_of(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    GPT2Config(vocab_size=len(tokenizer), n_positions=32).save_pretrained(tmp_path / "learned")
    shutil.copytree(TINY, tmp_path / "rotary", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((tmp_path / "rotary" / "config.json").read_text()) | {"max_position_embeddings": 32}
    (tmp_path / "rotary" / "config.json").write_text(json.dumps(config))
    learned, rotary = (AutoConfig.from_pretrained(tmp_path / name) for name in ("learned", "rotary"))
    longest = len(tokenizer(PROBLEMS["prompt"][1])["input_ids"])
    assert check_limits(learned, tokenizer, [PROBLEMS], 32 - longest) is None
    with pytest.raises(ConfigError, match=f"prompts of up to {longest} .* has 32 positions: lower train"):
        check_limits(learned, tokenizer, [PROBLEMS], 33 - longest)
    assert "it was not trained on longer texts" in str(check_limits(rotary, tokenizer, [PROBLEMS], 32))
