"""The features of a training, and what each of their values sets; every pair of values meets in a test.

The first value of a feature is the plain one. `REFUSED` has the pairs that do not work, with the reason that is given.
"""

from typing import Any

from grpo import losses
from grpo.options import LOSS_MEANS

FEATURES: dict[str, dict[str, dict[str, Any]]] = {
    "loss": {name: {"loss_type": name} for name in [*LOSS_MEANS, *losses.NAMES]},
    "level": {"token": {}, "sequence": {"importance_sampling_level": "sequence"}},
    "penalty": {
        "none": {},
        "KL": {"beta": 0.04},
        "KL, bias corrected": {"beta": 0.04, "use_bias_correction_kl": True},
        "KL, moving reference": {"beta": 0.04, "sync_ref_model": True, "ref_model_sync_steps": 1},
    },
    "iterations": {"1": {}, "2": {"num_iterations": 2}},
    "steps": {
        "a slice": {},
        "four slices": {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4},
        "two generations": {
            "gradient_accumulation_steps": 4,
            "per_device_train_batch_size": 4,
            "steps_per_generation": 2,
        },
        "a quarter of a generation": {
            "gradient_accumulation_steps": 2,
            "per_device_train_batch_size": 4,
            "steps_per_generation": 8,
        },
    },
    "entropy": {
        "none": {},
        "bonus": {"entropy_coef": 0.01},
        "adaptive": {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 5.0},
        "high-entropy tokens": {"top_entropy_quantile": 0.2},
    },
    "truncated": {"counted": {}, "masked": {"mask_truncated_completions": True}},
    "scaling": {"group": {}, "batch": {"scale_rewards": "batch"}, "none": {"scale_rewards": "none"}},
    "advantages": {"of each": {}, "of the best of two": {}},
    "clipping": {
        "ratio": {},
        "two-sided": {"delta": 1.5},
        "off-policy mask": {"off_policy_mask_threshold": 0.05},
    },
    "rewards": {
        "one": {},
        "two, added": {"reward_weights": [1.0, 0.5]},
        "two, each normalized": {"reward_weights": [1.0, 0.5], "multi_objective_aggregation": "normalize_then_sum"},
        "failing": {},
        "group-relative": {},
    },
    "policy": {
        "full attention": {},
        "experts": {},
        "mixed attention": {},
        "images, LLaVA-Next": {},
        "images, Qwen3.5": {},
        "gated DeltaNet": {},
    },
    "weights": {"all": {}, "LoRA": {}, "QLoRA": {}, "frozen tower": {}},
    "checkpointing": {
        "off": {},
        "on": {"gradient_checkpointing": True},
        "on, inputs offloaded": {"gradient_checkpointing": True},
    },
    "feed-forward": {"whole": {}, "in tiles": {}},
    "layers": {"as they are": {}, "compiled": {}},
    "prompts": {"shared": {}, "apart": {}},
    "tools": {"none": {}, "tools": {}, "environment": {}},
    "problems": {
        "in order": {},
        "dynamic sampling": {},
        "prioritized": {},
        "a mixture": {},
        "a mixture, prioritized": {},
    },
    "data": {"in memory": {}, "a stream": {"shuffle_dataset": False}},
    "degenerate": {"counted": {}, "skipped": {}},
    "engine": {
        "transformers": {},
        "vLLM, uncorrected": {"vllm_importance_sampling_correction": False},
        "vLLM, tokens truncated": {"vllm_importance_sampling_mode": "token_truncate"},
        "vLLM, sequences masked": {"vllm_importance_sampling_mode": "sequence_mask"},
        "a server, two steps ahead": {"vllm_mode": "server", "vllm_importance_sampling_mode": "token_truncate"},
        "vLLM, top-k": {"vllm_importance_sampling_mode": "token_truncate", "top_k": 6},
    },
    "evaluation": {"none": {}, "in mid-training": {"eval_strategy": "steps", "eval_steps": 1}},
    "resume": {"no": {}, "yes": {}},
}
"""Features, their values, and the fields of `GRPOConfig` that these set; `trainings.py` has the rest."""

UNKNOWN = ("dynamic sampling", "prioritized", "a mixture", "a mixture, prioritized")
OWN_LOSS = "train.loss_type={loss} needs"
REFUSED: list[tuple[dict[str, str], str]] = [
    *(
        ({"loss": loss, feature: value}, OWN_LOSS.format(loss=loss))
        for loss in losses.NAMES
        for feature, value in (
            ("level", "sequence"),
            ("entropy", "bonus"),
            ("entropy", "adaptive"),
            ("entropy", "high-entropy tokens"),
            ("clipping", "two-sided"),
            ("clipping", "off-policy mask"),
        )
    ),
    *(
        ({"penalty": "KL, moving reference", "weights": weights}, "sync_ref_model=True.*PEFT")
        for weights in ("LoRA", "QLoRA")
    ),
    ({"loss": "maxrl", "scaling": "group"}, "train.loss_type=maxrl needs"),
    ({"loss": "maxrl", "scaling": "batch"}, "train.loss_type=maxrl needs"),
    ({"loss": "maxrl", "rewards": "two, each normalized"}, "train.loss_type=maxrl needs"),
    ({"problems": "prioritized", "data": "a stream"}, "rollout.prioritize=true: .*a stream has none twice"),
    *(({"problems": problems, "data": "a stream"}, "a stream has no end") for problems in UNKNOWN[2:]),
    ({"advantages": "of the best of two", "loss": "maxrl"}, "train.loss_type=maxrl"),
    ({"advantages": "of the best of two", "rewards": "two, each normalized"}, "rollout.pass_at_k=2: .*the largest sum"),
    ({"loss": "vespo", "engine": "vLLM, sequences masked"}, "VESPO loss requires"),
    *(
        ({"engine": "a server, two steps ahead", feature: value}, f"engine.staleness=2: .*{reason}")
        for feature, values, reason in (
            ("policy", ("images, LLaVA-Next", "images, Qwen3.5"), "the task has images"),
            ("iterations", ("2",), "train.num_iterations=1"),
            ("steps", ("two generations", "a quarter of a generation"), "without train.steps_per_generation"),
        )
        for value in values
    ),
]
"""Pairs of values that a trainer refuses, with a part of the message."""

MEANINGLESS: list[dict[str, str]] = [
    *(
        {"policy": policy, "weights": "QLoRA" if policy.startswith("images") else "frozen tower"}
        for policy in FEATURES["policy"]
    ),
    {"engine": "a server, two steps ahead", "weights": "frozen tower"},
]
"""Pairs that say nothing: a text model has no tower; the tests have no quantized policies that see images."""
