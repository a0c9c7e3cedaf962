"""Top-p without top-k, with the real vLLM on a GPU: its sampler on a CPU has no masks of the tokens that it keeps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from grpo.evaluation.in_training import answer
from grpo.generation.transformers.completer import Completer
from grpo.options import Engine
from tests.engine_faults import LORA, trainer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM has masks on GPUs alone"),
]


@pytest.mark.parametrize(("adapter", "sends"), [(None, None), (LORA, "adapter")], ids=["all weights", "adapter"])
def test_top_p_alone_has_ratios_of_1(tmp_path: Path, adapter: LoraConfig | None, sends: str | None) -> None:
    options = {"top_p": 0.9, "max_completion_length": 8, "vllm_importance_sampling_mode": "token_truncate"}
    dtype = "float32" if adapter is None else "bfloat16"  # as vLLM's kernels for adapters need it
    options |= {"bf16": adapter is not None, "max_steps": 2}
    made = trainer(tmp_path, adapter, dtype=dtype, engine=Engine(sends) if sends else None, **options)
    assert made.vllm_generation.masks
    ratios, make = list[torch.Tensor](), made._generate_and_score_completions

    def noting(rows: Any) -> Any:
        batch = make(rows)
        ratios.append(batch["importance_sampling_ratio"][batch["completion_mask"].bool()])
        return batch

    made._generate_and_score_completions = noting
    made.train()
    allowed = 0.01 if adapter is None else 0.2
    assert all((ratio - 1).abs().mean() < allowed for ratio in ratios)
    rows = [row for row in made.state.log_history if "loss" in row]
    assert all(0.85 < row["sampling/kept_mass"] < 1 for row in rows)
    prompts = ["Tom has 3 pens.", "Anna has 12 cups. She buys 7."]
    made.vllm_generation.sync_weights()
    assert answer(made, prompts) == Completer(made.model.eval(), made.processing_class, 8)(prompts)
