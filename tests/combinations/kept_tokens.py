"""Stock TRL with an importance ratio over the tokens that a sampling filter has kept."""

from typing import Any

import torch
from trl.trainer import utils

from grpo.utils.patching import patched


def correct_over_kept(trainer: Any) -> None:
    """Have stock TRL compute its importance ratio over the tokens that a filter has kept, from the logits of all.

    These are made of what TRL's head gets: another forward pass would spoil TRL's own gradient with FSDP2.
    """
    generate, score, head = (
        trainer._generate,
        trainer._get_per_token_logps_and_entropies,
        utils._ChunkedLogProbFunction,
    )
    make, found, seen = trainer._generate_and_score_completions, dict[str, Any](), list[torch.Tensor]()

    class Seen:
        @staticmethod
        def apply(
            hidden: torch.Tensor, weight: torch.Tensor, bias: Any, targets: Any, temperature: float, *rest: Any
        ) -> Any:
            seen.append((hidden.double() @ weight.double().T / temperature).log_softmax(-1))
            return head.apply(hidden, weight, bias, targets, temperature, *rest)

    def noting(prompts: list) -> Any:
        generated = generate(prompts)
        found["kept"] = [[getattr(value, "kept", ()) for value in logps] for logps in generated[4]]
        return generated

    def over_kept(model: Any, ids: torch.Tensor, mask: torch.Tensor, length: int, *args: Any, **options: Any) -> tuple:
        if (kept := found.pop("kept", None)) is None:
            return score(model, ids, mask, length, *args, **options)
        seen.clear()
        with patched("trl.trainer.utils:_ChunkedLogProbFunction", Seen):
            scored = score(model, ids, mask, length, *args, **options)
        logps = torch.cat(seen).view(len(ids), -1, seen[0].size(-1))[:, -length:]
        mass = torch.zeros(scored[0].shape)
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
