"""The memory of images: of the current rollouts, and of vision tower and projector.

Functions return bytes unless stated otherwise. A tower works on patches. Each completion has its own copy of its
prompt's image, which goes through the tower in every micro-batch with the completion.
"""

from math import ceil

from grpo.planning.activations import distinct
from grpo.planning.vision import GATED, MERGES, QUICK_GELU, SHUFFLES, TILES, Vision
from grpo.planning.workload import Workload

ENGINE_TOKENS = 4096
"""Tokens of images that vLLM computes, and keeps, at once: `max_num_batched_tokens`, as TRL sets it."""


def patches(vision: Vision, workload: Workload) -> int:
    """Return the patches of a prompt's image, limited by `task.max_pixels` and by the prompt's tokens."""
    limit = workload.prompt * vision.spatial_merge_size**2
    if vision.image_size:
        tile = (vision.image_size // vision.patch_size) ** 2
        return tile * max(1, min(TILES.get(vision.model_type, 1), limit // tile))
    pixels = workload.images.max_pixels if workload.images else None
    return min(limit, pixels // vision.patch_size**2) if pixels else limit


def images_at_once(vision: Vision, workload: Workload, completions: int) -> int:
    """Return how many of some completions, and images, fit into a micro-batch if prompts and completions are short."""
    tokens = patches(vision, workload) // vision.spatial_merge_size**2 + 1
    return max(1, min(completions, workload.microbatch // tokens))


def pixel_values(vision: Vision, workload: Workload) -> float:
    """Bytes of a completion's image from the processor: float32, and with tiles a mask, 8 bytes per pixel."""
    mask = 8 * vision.patch_size**2 if vision.model_type in SHUFFLES else 0
    return float(patches(vision, workload) * (4 * vision.patch_numbers + mask))


def is_trained(workload: Workload) -> bool:
    """Whether the weights of the tower, or adapters on them, are trained."""
    return workload.adapter.vision if workload.adapter else "vision" not in workload.freeze


def layer_kept(vision: Vision, workload: Workload) -> float:
    """Bytes per patch that autograd keeps of a layer of the tower.

    Norms keep their input in float32, as autocast computes them on a GPU; RMS norms also keep their result if their own
    weight is trained. Attention keeps queries and keys, before and after a rotation, values, its output and its
    log-sum-exp. The feed-forward layer keeps the inputs of its activation and the factor of its output. Trained linear
    modules keep their input, and so do adapters.
    """
    hidden, width, size = vision.hidden_size, vision.intermediate_size, workload.compute_bytes
    fused = vision.model_type in MERGES
    attention = size * (6 if fused else 4) * hidden + 4 * vision.num_attention_heads
    wide = 3 if vision.model_type in GATED else 2 if vision.model_type in QUICK_GELU else 1
    per_patch = 2 * 4 * hidden + attention + size * wide * width
    if not is_trained(workload):
        return per_patch
    if workload.adapter:
        named: dict[str, float] = {
            name: inputs for name, (inputs, _, _) in vision.linears().items() if workload.adapter.adapts(name)
        }
        ranks = len(named) * workload.adapter.rank
        if vision.model_type in GATED and not workload.adapter.copies:
            named = distinct(named)  # elsewhere autocast copies a layer norm's output
        return per_patch + size * (sum(named.values()) + ranks)
    if vision.model_type in GATED:
        per_patch += 2 * size * hidden
    return per_patch + size * ((3 if fused else 5) * hidden + width)


def tower_kept(vision: Vision, workload: Workload) -> float:
    """Bytes per patch that autograd keeps of tower and projector; with checkpointing of the layers their inputs."""
    projector = (4 + 3 * workload.compute_bytes) * vision.hidden_size * (1 + vision.num_deepstack)
    if not is_trained(workload):
        return projector if workload.adapter is None and "projector" not in workload.freeze else 0.0
    layer = workload.compute_bytes * vision.hidden_size if workload.checkpointing else layer_kept(vision, workload)
    return vision.num_hidden_layers * layer + projector


def forward(vision: Vision, workload: Workload) -> float:
    """Bytes per patch that a layer of the tower takes for a while without gradient."""
    size = workload.compute_bytes
    wide = 3 if vision.model_type in GATED else 2
    attention = (4 * size + 16) * vision.hidden_size
    return max(attention, 2 * size * vision.hidden_size + size * wide * vision.intermediate_size)


def backward(vision: Vision, workload: Workload) -> float:
    """Bytes per patch that the backward pass of a layer of the tower takes for a while."""
    layer = layer_kept(vision, workload) if workload.checkpointing else 0.0
    size, wide = workload.compute_bytes, 4 if workload.adapter and workload.adapter.vision else 3
    return layer + size * wide * vision.intermediate_size + (12 + 2 * size) * vision.hidden_size


def held_images(vision: Vision | None, workload: Workload, phase: str) -> dict[str, float]:
    """Return the bytes of images that are on the device in a phase, as `pixel values` and `image features`.

    During a rollout, the images of the last generation are still on the device. The update joins the images of a step
    into a tensor, and copies the images of a micro-batch from it. Features are kept if tower and projector are frozen
    (`grpo/model/image_features.py`).
    """
    if not (vision and workload.images):
        return {}
    every, step = workload.images.per_generation, workload.images.per_step
    images = {
        "rollout": every + (0 if workload.vllm_fraction or workload.on_server else workload.prompts_at_once),
        "logprobs": 2 * every + images_at_once(vision, workload, every),
        "update": every + step + images_at_once(vision, workload, step),
    }
    held = {"pixel values": images[phase] * pixel_values(vision, workload)}
    trained = is_trained(workload) or (workload.adapter is None and "projector" not in workload.freeze)
    if not trained and workload.sharding.processes == 1:
        tokens = patches(vision, workload) // vision.spatial_merge_size**2
        size = workload.compute_bytes * vision.out_hidden_size * (1 + vision.num_deepstack)
        held["image features"] = ceil(every / workload.completions_per_prompt) * tokens * size
    return held


def without_gradient(vision: Vision | None, workload: Workload, phase: str) -> float:
    """Bytes of the tower for the prompts that a `rollout` reads at once, otherwise for the prompts of a micro-batch."""
    if not (vision and workload.images):
        return 0.0
    scored = images_at_once(vision, workload, workload.images.per_generation)
    images = workload.prompts_at_once if phase == "rollout" else scored
    return images * patches(vision, workload) * forward(vision, workload)


def in_update(vision: Vision | None, workload: Workload) -> tuple[float, float]:
    """Return the bytes of a micro-batch's images that the tower keeps for its backward pass, and takes in it."""
    if not (vision and workload.images):
        return 0.0, 0.0
    count = images_at_once(vision, workload, workload.images.per_step) * patches(vision, workload)
    work = backward(vision, workload) if is_trained(workload) else forward(vision, workload)
    return count * tower_kept(vision, workload), count * work


def decoded(vision: Vision | None, workload: Workload) -> float:
    """Bytes of host memory per process for the images of a generation: decoded, and three times the pixel values.

    Each distinct image is decoded once, and TRL copies the prompts (`_generate`). The pixel values are the processor's
    and two copies for the device (`_generate_single_turn` of TRL). Later, if processes compute each other's
    completions, they are the values of all prompts of a step and the values that this process sends
    (`grpo/trainer/update/gathering.py`).
    """
    if not (vision and workload.images):
        return 0.0
    picture = 3 * vision.patch_size**2 * patches(vision, workload)
    prompts = ceil(workload.images.per_step / workload.completions_per_prompt)
    moves = workload.processes > 1 and workload.sharding.processes == 1
    images = max(3 * workload.images.per_generation, (workload.processes + 1) * prompts if moves else 0)
    return 2 * workload.images.opened * picture + images * pixel_values(vision, workload)


def profiled(vision: Vision | None, workload: Workload) -> float:
    """Bytes that vLLM reserves for its tower: the patches of `ENGINE_TOKENS` tokens at once, or of a larger image."""
    if not (vision and workload.images):
        return 0.0
    count = max(ENGINE_TOKENS * vision.spatial_merge_size**2, patches(vision, workload))
    features = ENGINE_TOKENS * workload.compute_bytes * vision.out_hidden_size  # features of images for later requests
    return count * (forward(vision, workload) + workload.compute_bytes * vision.patch_numbers) + features
