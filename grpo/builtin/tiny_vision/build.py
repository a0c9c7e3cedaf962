"""Build the built-in vision policy: `python -m grpo.builtin.tiny_vision.build`, which takes ten minutes on two cores.

A LLaVA of one and a half million parameters learns to answer questions about pictures of shapes from a noisy teacher,
who sees every shape, but in seven answers of ten forgets one of them in counting, or names only the colour of the
largest. The resulting policy sees well and usually gives the wrong answer, which reinforcement learning can improve.
"""

import argparse
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from grpo.builtin.tasks.shapes import CELL, CELLS, COLOURS, KINDS, Problem, picture, problems
from grpo.builtin.tiny.build import language_config, train

NOISE = 0.7
"""Probability that the teacher gives the wrong answer."""
IMAGE = "<image>"
"""Token that stands for a part of an image."""
CHAT_TEMPLATE = """\
{%- for message in messages %}{% if message['content'] is string %}{{ message['content'] }}
{%- else %}{% for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}
{%- endif %}{{ '\n' }}{% endfor %}"""


def taught(problem: Problem, rng: random.Random, noise: float) -> str:
    """Return the answer of a teacher who gives the wrong one with a probability of `noise`."""
    if rng.random() >= noise:
        return problem.answer
    return str(len(problem.shapes) - 1) if problem.counts else problem.answer.split()[0]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of words and digits."""
    words = ["How", "many", "shapes", "are", "there", "Which", "shape", "is", "the", "largest", "?", "\n"]
    vocabulary = ["<pad>", "<eos>", "<unk>", IMAGE, *words, *COLOURS, *KINDS, *map(str, range(10))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    splits = [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.Split("?", "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.Split("\n", "isolated")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=[IMAGE],
        padding_side="left",
        model_max_length=128,
    )


def make_processor() -> LlavaProcessor:
    """Return the processor: one part of an image is a cell of the grid."""
    side = {"height": CELLS * CELL, "width": CELLS * CELL}
    images = CLIPImageProcessorPil(size=side, crop_size=side, image_mean=[1.0] * 3, image_std=[0.5] * 3)
    return LlavaProcessor(
        image_processor=images,
        tokenizer=make_tokenizer(),
        patch_size=CELL,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlavaForConditionalGeneration:
    """Return the untrained policy."""
    torch.manual_seed(seed)
    vision = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=CELLS * CELL,
        patch_size=CELL,
        projection_dim=128,
    )
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=language_config(tokenizer),
            image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
            vision_feature_layer=-1,
            tie_word_embeddings=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def batches(processor: LlavaProcessor, size: int, steps: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield `steps` batches of `size` training problems with the teacher's answers; only the answers carry labels.

    The teacher begins without a mistake, and after two thirds of the steps has reached `NOISE`.
    """
    rng, stream = random.Random(seed), problems("train", seed)
    eos = processor.tokenizer.eos_token
    for step in range(steps):
        drawn, noise = list(islice(stream, size)), NOISE * min(1, 1.5 * step / steps)
        texts = [f"{IMAGE}{problem.question}\n{taught(problem, rng, noise)} {eos}" for problem in drawn]
        images = [[picture(problem)] for problem in drawn]
        batch = processor(images=images, text=texts, padding=True, return_tensors="pt")
        ids, newline = batch["input_ids"], processor.tokenizer.convert_tokens_to_ids("\n")
        asked = (ids == newline).flip(1).cumsum(1).flip(1) > 0  # up to the end of the question
        yield {**batch, "labels": ids.masked_fill(asked | (batch["attention_mask"] == 0), -100)}


def main() -> None:
    """Build, train and write the policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder to write")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    processor = make_processor()
    model = make_model(processor.tokenizer, args.seed)
    print(f"{model.num_parameters():,} parameters, {len(processor.tokenizer)} tokens")
    train(model, batches(processor, args.batch_size, args.steps, args.seed), args.steps, learning_rate=1e-3)
    model.half().save_pretrained(args.output)
    processor.save_pretrained(args.output)


if __name__ == "__main__":
    main()
