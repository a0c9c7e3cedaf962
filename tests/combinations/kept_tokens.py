"""Stock TRL with an importance ratio over the tokens that a sampling filter has kept."""

from typing import Any

import torch


def correct_over_kept(trainer: Any) -> None:
    """Have stock TRL compute its importance ratio over the tokens that a filter has kept, from the logits of all."""
    generate, score = trainer._generate, trainer._get_per_token_logps_and_entropies
    make, found = trainer._generate_and_score_completions, dict[str, Any]()

    def noting(prompts: list) -> Any:
        generated = generate(prompts)
        found["kept"] = [[getattr(value, "kept", ()) for value in logps] for logps in generated[4]]
        return generated

    def over_kept(model: Any, ids: torch.Tensor, mask: torch.Tensor, length: int, *args: Any, **options: Any) -> tuple:
        scored = score(model, ids, mask, length, *args, **options)
        if (kept := found.pop("kept", None)) is None:
            return scored
        names = ("pixel_values", "image_grid_thw", "image_sizes", "mm_token_type_ids")
        images = {name: options[name] for name in names if options.get(name) is not None}
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **images).logits[:, -length - 1 : -1]
        logps, mass = logits.float().log_softmax(-1), torch.zeros(scored[0].shape)
        for row, completion in enumerate(kept):
            for place, tokens in enumerate(completion):
                if tokens:
                    mass[row, place] = logps[row, place, list(tokens)].logsumexp(0)
        found["mass"] = mass
        return scored[0] - mass, *scored[1:]

    def over_all(rows: Any) -> Any:
        batch = make(rows)
        for name in ("old_per_token_logps", "sampling_per_token_logps"):
            batch[name] = batch[name] + found["mass"]
        return batch

    trainer._generate, trainer._get_per_token_logps_and_entropies = noting, over_kept
    trainer._generate_and_score_completions = over_all
