"""The stage of a step on which a key of the configuration acts first."""

from grpo.extras.replay.compare import STAGES

NOTHING = "nothing"
"""Keys of this stage change no step: they log, save, plan, evaluate or start."""
DIGESTS = {
    "problems": "problems",
    "completions": "completions",
    "sampler": "completions",
    "rewards": "rewards",
    "advantages": "advantages",
    "batch": "old log-probabilities",
    "log_probs": "log-probabilities",
    "loss": "loss",
    "gradient": "gradient",
    "learning_rate": "learning rate",
    "weights": "weights",
    "optimizer": "optimizer",
}
"""Digests of `steps.jsonl` in the order of a step, and the stages of which they are."""
ACTS: dict[str, tuple[str, ...]] = {
    NOTHING: (
        *(
            "train.logging",
            "train.log_",
            "train.report_to",
            "train.run_name",
            "train.save_",
            "train.eval_",
            "train.hub_",
        ),
        *("train.push_to_hub", "train.disable_tqdm", "train.project", "train.trackio", "train.resume_from_checkpoint"),
        *("train.num_completions_to_print", "train.per_device_eval_batch_size", "train.dataloader_", "task.eval."),
        *(
            "completions.",
            "plan.",
            "preflight.",
            "evaluate.",
            "launch.timeout",
            "launch.rendezvous",
            "sweep.",
            "replay.",
        ),
        *("callbacks.", "gpu.", "train.restore_callback", "train.load_best", "train.metric_for_best", "model.shape."),
        *("launch.max_restarts", "task.eval", "train.ddp_", "train.output_dir", "train.skip_memory", "train.include_"),
        *("train.prediction_loss", "train.batch_eval", "train.debug", "train.do_", "train.greater_is_better"),
        *("train.label_names", "train.local_rank", "train.length_column", "train.enable_jit", "train.remove_unused"),
        *("train.torch_empty_cache", "train.use_cache"),
    ),
    "start": ("model.", "peft.", "train.model_init_kwargs"),
    "problems": (
        "task.",
        "train.seed",
        "train.data_seed",
        "train.shuffle_dataset",
        "rollout.",
        "train.per_device_train",
        "train.ignore_data_skip",
        "train.train_sampling",
    ),
    "completions": (
        *("train.temperature", "train.top_", "train.min_p", "train.repetition", "train.max_completion_length"),
        *("train.generation_", "train.use_vllm", "train.vllm_", "train.cache_", "train.num_generations", "engine."),
        *("train.chat_template", "train.max_tool", "train.use_transformers", "train.transformers_continuous"),
        *("train.steps_per_generation", "train.ds3_gather", "guard."),
    ),
    "rewards": ("reward.",),
    "advantages": ("train.scale_rewards", "train.multi_objective", "train.reward_weights"),
    "learning rate": (
        "train.learning_rate",
        "train.lr_scheduler",
        "train.warmup",
        "train.max_steps",
        "train.num_train",
    ),
    "weights": ("train.optim", "train.adam_", "train.weight_decay"),
    "gradient": ("train.max_grad_norm",),
    "old log-probabilities": ("train.beta", "train.sync_ref_model", "train.ref_model"),
    "log-probabilities": (
        *("train.bf16", "train.fp16", "train.tf32", "update.", "train.gradient_checkpointing", "train.fsdp"),
        *("train.deepspeed", "train.torch_compile", "train.use_liger", "train.liger", "train.neftune", "train.use_cpu"),
        *("train.pad_to_multiple", "train.cast_lm_head", "train.disable_dropout", "train.full_determinism"),
        *("train.accelerator_config", "train.parallelism_config"),
    ),
    "loss": (
        *("train.loss_type", "train.epsilon", "train.delta", "train.importance_sampling", "train.mask_"),
        *("train.entropy", "train.use_adaptive_entropy", "train.top_entropy", "train.off_policy", "train.sapo"),
        *(
            "train.num_iterations",
            "train.gradient_accumulation",
            "train.average_tokens",
            "train.vespo",
            "train.router_aux",
        ),
        *("train.use_bias_correction_kl", "train.label_smoothing"),
    ),
}
"""Beginnings of keys by stage; the longest that fits decides."""
ORDER = tuple(STAGES)


def stage_of(key: str) -> str | None:
    """Return the first stage on which a key acts; None of a key that is not known."""
    fitting = [(len(start), stage) for stage, starts in ACTS.items() for start in starts if key.startswith(start)]
    if key.startswith("reward.") and key.endswith(".weight"):
        return "advantages"
    return max(fitting)[1] if fitting else None


def is_before(stage: str, other: str) -> bool:
    """Return whether a step computes a stage before another."""
    return ORDER.index(stage) < ORDER.index(other)
