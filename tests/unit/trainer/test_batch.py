"""The fields of a batch, as TRL makes them."""

import ast
import inspect
import textwrap

import pytest
import torch
from trl import GRPOTrainer

from grpo.trainer.batch import FIELDS, pick


def test_each_field_of_trls_batch_is_declared() -> None:
    source = textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions))
    names = set()
    for node in ast.walk(ast.parse(source)):
        for target in getattr(node, "targets", []):
            if isinstance(target, ast.Subscript) and ast.unparse(target.value) == "output":
                names.add(ast.literal_eval(target.slice))
            if ast.unparse(target) == "output":
                names |= {ast.literal_eval(key) for key in node.value.keys}
    assert len(names) > 15
    assert names | {"generated_at", "kept_tokens", "completion_id", "router_factors"} == set(FIELDS)


def test_a_field_that_is_not_declared_is_an_error_that_names_it() -> None:
    batch = {"prompt_ids": torch.zeros(2, 1), "image_crops": torch.zeros(2)}
    with pytest.raises(ValueError, match="image_crops"):
        pick(batch, [0])
