"""The vision tower and the projector of a model: the numbers of an architecture, and the memory that follows from them.

Functions return bytes unless they say otherwise. A tower works on patches. Each completion has its own copy of its
prompt's image, which goes through the tower with every micro-batch that the completion is in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo.planning.workload import Workload

MERGES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Families whose projector is in the tower, and makes one token of several patches beside each other."""
GATED = ("qwen2_5_vl",)
"""Families whose tower has SwiGLU and RMS norms."""
QUICK_GELU = ("qwen2_vl", "llava", "llava_next")
"""Families whose tower keeps the sigmoid of its activation as well."""
SHUFFLES = ("smolvlm", "idefics3")
"""Families whose projector is one matrix, over several patches beside each other. Their processors give a mask."""
HEADS = ("num_heads", "num_attention_heads", "attention_heads")
"""Names of the number of attention heads."""
ENGINE_TOKENS = 4096
"""Tokens of images that vLLM computes, and keeps, at once: `max_num_batched_tokens`, as TRL sets it."""
TILES = {"smolvlm": 17, "idefics3": 17, "internvl": 13, "llava_next": 5}
"""Most tiles that an image is cut into, the whole image in small included, as published processors do."""


@dataclass(frozen=True)
class Vision:
    """A transformer over the patches of images. Names are those of Hugging Face configurations."""

    model_type: str
    """Family of the whole model, such as `qwen2_5_vl`."""
    hidden_size: int
    """Width of the tower."""
    intermediate_size: int
    """Width of its feed-forward layers."""
    num_hidden_layers: int
    num_attention_heads: int
    patch_size: int
    """Pixels in a row of a patch."""
    out_hidden_size: int
    """Width of the language model, to which the projector leads."""
    temporal_patch_size: int = 1
    """Frames of a patch; a picture is repeated."""
    spatial_merge_size: int = 1
    """Patches in a row that become one token."""
    image_size: int = 0
    """Pixels in a row of each image or tile; 0 where images keep their size."""
    num_position_embeddings: int = 0
    """Learned positions; 0 with rotary ones alone."""
    num_deepstack: int = 0
    """Further projectors, of features from within the tower (Qwen3-VL)."""

    @property
    def patch_numbers(self) -> int:
        """Numbers of a patch's pixels."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    def linears(self) -> dict[str, tuple[int, int, int]]:
        """Return the linear modules of the tower: inputs, outputs and count of each name."""
        hidden, width, layers = self.hidden_size, self.intermediate_size, self.num_hidden_layers
        square = (hidden, hidden, layers)
        if self.model_type in MERGES:
            attention = {"qkv": (hidden, 3 * hidden, layers), "proj": square}
        else:
            attention = {"q_proj": square, "k_proj": square, "v_proj": square, "out_proj": square}
        if self.model_type in GATED:
            up = (hidden, width, layers)
            return attention | {"gate_proj": up, "up_proj": up, "down_proj": (width, hidden, layers)}
        first, second = ("linear_fc1", "linear_fc2") if self.model_type == "qwen3_vl" else ("fc1", "fc2")
        return attention | {first: (hidden, width, layers), second: (width, hidden, layers)}

    def projector_linears(self) -> dict[str, tuple[int, int, int]]:
        """Return the linear modules of the projector: inputs, outputs and count of each name."""
        wide, out = self.hidden_size * self.spatial_merge_size**2, self.out_hidden_size
        if self.model_type in SHUFFLES:
            return {"proj": (wide, out, 1)}
        inner, count = (wide, 1 + self.num_deepstack) if self.model_type in MERGES else (out, 1)
        first, second = ("linear_fc1", "linear_fc2") if self.model_type == "qwen3_vl" else ("linear_1", "linear_2")
        if self.model_type in ("qwen2_vl", "qwen2_5_vl"):
            first, second = "0", "2"
        return {first: (wide, inner, count), second: (inner, out, count)}

    def tower_parameters(self) -> int:
        """Return the number of parameters of the tower."""
        hidden = self.hidden_size
        layers = sum((inputs + 1) * outputs * count for inputs, outputs, count in self.linears().values())
        layers += self.num_hidden_layers * (2 if self.model_type in GATED else 4) * hidden
        embedding = self.patch_numbers * hidden + self.num_position_embeddings * hidden
        if self.model_type in ("qwen2_vl", "qwen2_5_vl"):
            return layers + embedding
        if self.model_type in ("llava", "llava_next"):  # CLIP: a class token, a norm before and one after the layers
            return layers + embedding + hidden + 4 * hidden
        return layers + embedding + hidden + (0 if self.model_type in MERGES else 2 * hidden)

    def projector_parameters(self) -> int:
        """Return the number of parameters of the projector."""
        biased = self.model_type not in SHUFFLES
        count = sum((i + biased) * o * many for i, o, many in self.projector_linears().values())
        if self.model_type not in MERGES:
            return count
        wide = self.hidden_size * self.spatial_merge_size**2  # of the norms within the tower
        return count + self.hidden_size * (1 if self.model_type in GATED else 2) + self.num_deepstack * 2 * wide

    def parameters_of(self, *parts: str) -> int:
        """Return the number of parameters of `vision`, of `projector`, or of both."""
        counts = {"vision": self.tower_parameters(), "projector": self.projector_parameters()}
        return sum(counts[part] for part in set(parts))


def vision_of(config: Mapping[str, Any]) -> Vision | None:
    """Return the vision part that a Hugging Face `config.json`, or a `shape:` of ours, describes.

    None without one, or without the numbers of a transformer over patches: such a tower is not in the plan.
    """
    part = config.get("vision_config") or {}
    family = str(config.get("model_type", "")).removesuffix("_moe")

    def number(*names: str, default: int = 0) -> int:
        found = (part.get(name) for name in names)
        sides = (value[0] if isinstance(value, Sequence) and value else value for value in found)
        return next((int(value) for value in sides if isinstance(value, int)), default)

    hidden = number("embed_dim", "hidden_size") if family == "qwen2_vl" else number("hidden_size")
    patch, layers, heads = number("patch_size"), number("depth", "num_hidden_layers"), number(*HEADS)
    if not (hidden and patch and layers and heads):
        return None
    side = 0 if family in MERGES else number("image_size", default=0)
    positions = (side // patch) ** 2 + (family in ("llava", "llava_next"))
    merged = int(config.get("scale_factor", 2)) if family in SHUFFLES else 1
    if family == "internvl":
        merged = 2
    if family == "gemma3":  # patches are averaged to so many tokens
        merged = (side // patch) // int(int(config.get("mm_tokens_per_image", 256)) ** 0.5)
    return Vision(
        model_type=family,
        hidden_size=hidden,
        intermediate_size=number("intermediate_size", default=hidden * number("mlp_ratio", default=4)),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        patch_size=patch,
        out_hidden_size=int((config.get("text_config") or config).get("hidden_size", hidden)),
        temporal_patch_size=number("temporal_patch_size", default=2 if family in MERGES else 1),
        spatial_merge_size=number("spatial_merge_size", default=2 if family in MERGES else merged),
        image_size=side,
        num_position_embeddings=number("num_position_embeddings", default=2304 if family == "qwen3_vl" else positions),
        num_deepstack=len(part.get("deepstack_visual_indexes") or []) if family == "qwen3_vl" else 0,
    )


def patches(vision: Vision, workload: Workload) -> int:
    """Return the patches of a prompt's image: what `task.max_pixels` allows, at most what the prompt's tokens hold."""
    most = workload.prompt * vision.spatial_merge_size**2
    if vision.image_size:
        tile = (vision.image_size // vision.patch_size) ** 2
        return tile * max(1, min(TILES.get(vision.model_type, 1), most // tile))
    pixels = workload.images.max_pixels if workload.images else None
    return min(most, pixels // vision.patch_size**2) if pixels else most


def images_at_once(vision: Vision, workload: Workload, completions: int) -> int:
    """Return how many of some completions, and images, fit into a micro-batch if prompts and completions are short."""
    tokens = patches(vision, workload) // vision.spatial_merge_size**2 + 1
    return max(1, min(completions, workload.microbatch // tokens))


def pixel_values(vision: Vision, workload: Workload) -> float:
    """Bytes of one completion's image as the processor gives it: float32, and with tiles a mask, 8 bytes per pixel."""
    mask = 8 * vision.patch_size**2 if vision.model_type in SHUFFLES else 0
    return float(patches(vision, workload) * (4 * vision.patch_numbers + mask))


def is_trained(workload: Workload) -> bool:
    """Whether the weights of the tower, or adapters on them, are trained."""
    return workload.adapter.vision if workload.adapter else "vision" not in workload.freeze


def layer_kept(vision: Vision, workload: Workload) -> float:
    """Bytes per patch that autograd keeps of one layer of the tower.

    Norms keep their input in float32, as autocast computes them on a GPU; RMS norms also their result where their own
    weight is trained. Attention keeps queries and keys, before and after rotation where there is one, values, its
    output and its log-sum-exp. The feed-forward layer keeps the inputs of its activation and what is multiplied with
    it. Linear modules keep their input where it is trained: one each, and a copy per adapter.
    """
    hidden, width, size = vision.hidden_size, vision.intermediate_size, workload.compute_bytes
    fused = vision.model_type in MERGES
    attention = size * (6 if fused else 4) * hidden + 4 * vision.num_attention_heads
    wide = 3 if vision.model_type in GATED else 2 if vision.model_type in QUICK_GELU else 1
    kept = 2 * 4 * hidden + attention + size * wide * width
    if not is_trained(workload):
        return kept
    if workload.adapter:
        named = [inputs for name, (inputs, _, _) in vision.linears().items() if workload.adapter.adapts(name)]
        return kept + size * (sum(named) + len(named) * workload.adapter.rank)
    if vision.model_type in GATED:
        kept += 2 * size * hidden
    return kept + size * ((3 if fused else 5) * hidden + width)


def kept(vision: Vision, workload: Workload) -> float:
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
    """Return the bytes of images that are on the device in a phase, as `pixel values`.

    While rollouts are made, those of the last generation are still there. The update joins the images of a step to one
    tensor, and takes those of a micro-batch from it.
    """
    if not (vision and workload.images):
        return {}
    every, step = workload.images.per_generation, workload.images.per_step
    images = {
        "rollout": every + (0 if workload.vllm_share or workload.on_server else workload.sequences),
        "logprobs": 2 * every + images_at_once(vision, workload, every),
        "update": every + step + images_at_once(vision, workload, step),
    }
    return {"pixel values": images[phase] * pixel_values(vision, workload)}


def in_rollout(vision: Vision | None, workload: Workload) -> float:
    """Bytes that the tower takes for the images of all prompts that are completed at once."""
    return _forward(vision, workload, workload.sequences)


def in_logprobs(vision: Vision | None, workload: Workload) -> float:
    """Bytes that the tower takes for the images of a micro-batch without gradient."""
    most = workload.images.per_generation if workload.images else 0
    return _forward(vision, workload, images_at_once(vision, workload, most) if vision else 0)


def _forward(vision: Vision | None, workload: Workload, images: int) -> float:
    if not (vision and workload.images):
        return 0.0
    return images * patches(vision, workload) * forward(vision, workload)


def in_update(vision: Vision | None, workload: Workload) -> tuple[float, float]:
    """Return the bytes of a micro-batch's images that the tower keeps for its backward pass, and takes in it."""
    if not (vision and workload.images):
        return 0.0, 0.0
    count = images_at_once(vision, workload, workload.images.per_step) * patches(vision, workload)
    work = backward(vision, workload) if is_trained(workload) else forward(vision, workload)
    return count * kept(vision, workload), count * work


def decoded(vision: Vision | None, workload: Workload) -> float:
    """Bytes of host memory that the images of a generation take in a process: decoded, and three times pixel values.

    Each distinct image is decoded once, and TRL copies the prompts (`_generate`). Pixel values are the processor's, and
    two copies on their way to the device (`_generate_single_turn` of TRL).
    """
    if not (vision and workload.images):
        return 0.0
    picture = 3 * vision.patch_size**2 * patches(vision, workload)
    return 2 * workload.images.opened * picture + workload.images.per_generation * 3 * pixel_values(vision, workload)


def profiled(vision: Vision | None, workload: Workload) -> float:
    """Bytes that vLLM keeps free for its tower: for so many patches at once as `ENGINE_TOKENS`, or one image, has."""
    if not (vision and workload.images):
        return 0.0
    count = max(ENGINE_TOKENS * vision.spatial_merge_size**2, patches(vision, workload))
    kept = ENGINE_TOKENS * workload.compute_bytes * vision.out_hidden_size  # features of images for later requests
    return count * (forward(vision, workload) + workload.compute_bytes * vision.patch_numbers) + kept
