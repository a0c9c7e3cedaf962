"""Completions in tensors of fixed shapes, whose decoding step a GPU records in a CUDA graph and repeats.

Python takes five times as long to start the kernels of a token one by one as a GPU takes to compute them. Recorded,
they start together: a step reads and writes the same memory each time, chooses the tokens, and notes which completions
have ended, so that the host waits for no token. It reads two steps later which have ended.

When the cache is full, when few of the completions go on, and when prompts join, the memory is placed anew and
the step recorded anew; the recorded step has to reproduce the logits of one by Python. At the end all of this memory is
free for the update. Without a GPU the same steps are not recorded.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from grpo.generation.transformers.continuous_batch import continued, gathers_weights
from grpo.generation.transformers.growing_cache import CACHE
from grpo.generation.transformers.prompt_cache import shared_keys
from grpo.generation.transformers.sampling import drawn
from grpo.generation.transformers.settings import chosen
from grpo.generation.transformers.static_cache import MULTIPLE, StaticCache
from grpo.generation.transformers.turns import Turns
from grpo.utils.attention import policy_of, relative_rounding
from grpo.utils.oom import tried

ROOM = 512
"""Tokens of a completion that the cache has room for at first; each time it is full, it has room for twice as many."""
FEW = 0.25
"""Fraction of unfinished rows from which the others are dropped; a recording takes as long as ten repeated steps."""
LATE = 2
"""Steps after which the host reads which completions have ended."""
BY_TOKENS_BEFORE = {
    *("min_new_tokens", "min_length", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias"),
    "forced_eos_token_id",
}
"""Fields of a generation config by which a token depends on those before it, not on its scores alone."""


def why_not_static(model: Any, config: GenerationConfig) -> str | None:
    """Return why the decoding step of a policy, whose prompts are read once, cannot be recorded, or None.

    See also `why_not_shared` and the trial.
    """
    if gathers_weights(model):
        return "its weights are sharded"
    if getattr(policy_of(model).config.get_text_config(), "attention_chunk_size", None):
        return "some of its layers attend within chunks"
    fields = chosen(config)
    return next((f"its generation_config has {name}={of}" for name, of in fields if name in BY_TOKENS_BEFORE), None)


@dataclass
class Row:
    """A completion in the batch."""

    number: int
    prompt: int
    """Place of its prompt in the cache."""
    read: list[int]
    """Tokens of its prompt."""
    begun: int
    """Number of the step before its second token."""
    going: bool = True
    """Whether the host does not know yet that it has ended."""


class Rows(NamedTuple):
    """Completions on the device, a row each; the steps change the tensors in place."""

    tokens: torch.Tensor
    """Tokens of completions, (rows, most)."""
    lengths: torch.Tensor
    """Tokens in the cache, (rows): the place of the last token."""
    going: torch.Tensor
    """Whether they have not ended, (rows)."""
    positions: torch.Tensor
    """Positions of their first tokens, (rows), or (rows, dimensions) with images."""

    def of(self, rows: list[int]) -> "Rows":
        """Return copies of some rows."""
        return Rows(*(tensor[rows] for tensor in self))

    def and_further(self, rows: "Rows") -> "Rows":
        """Return these rows and others behind them."""
        return Rows(*map(torch.cat, zip(self, rows, strict=True)))


class StaticBatch:
    """Unfinished and ended completions, as in `ContinuousBatch`.

    Args:
        turns: as in `ContinuousBatch`, for a policy whose layers have the keys of all tokens and no state.
        records: whether steps are recorded.
    """

    def __init__(self, turns: Turns | None = None, records: bool = True) -> None:
        self.turns = turns
        self.ended: dict[int, list[int]] = {}
        """Tokens of completions that have ended, by their numbers."""
        self.why_not_recorded = None if records else "for a trial"
        self._stream: torch.cuda.Stream | None = None
        self.restart()

    def __len__(self) -> int:
        """Return how many completions have not ended, as far as the host knows."""
        return sum(row.going for row in self.rows)

    def restart(self) -> None:
        """Drop the completions that have not ended."""
        self.rows: list[Row] = []
        self.step = 0
        """Number of steps since the first prompt."""
        self._cache: Any = None
        """A `StaticCache`, where there are rows."""
        self._rows: Any = None
        """The `Rows` on the device."""
        self._graph: torch.cuda.CUDAGraph | None = None
        """The step that was recorded last."""
        self._is_placed_anew = True
        """Whether the memory is another than that of the recorded step."""

    @torch.no_grad()
    def begin(self, model: Any, inputs: Any, numbers: Sequence[Sequence[int]], most: int, **options: Any) -> None:
        """Read prompts and generate until at most `most` completions are unfinished; see `ContinuousBatch.begin`."""
        arguments = continued(self.turns, model, inputs, options)
        model.generate(**arguments, custom_generate=partial(self.decode, numbers, most))

    def decode(
        self,
        numbers: Sequence[Sequence[int]],
        most: int,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **inputs: Any,
    ) -> torch.Tensor:
        """Replace the loop of `generate`, with its arguments; see `begin`."""
        mask = inputs.get("attention_mask")  # None without padding
        seen = torch.ones_like(input_ids) if mask is None else mask
        outputs = model._prefill(input_ids, generation_config, inputs)
        inputs = model._update_model_kwargs_for_generation(outputs, inputs)
        logits = outputs.logits[:, -1]
        del outputs
        positions = inputs["position_ids"][..., -1].movedim(-1, 0) if "position_ids" in inputs else seen.sum(1)
        ends = generation_config.eos_token_id
        self.ends = torch.tensor([-1] if ends is None else ends, device=input_ids.device).view(-1)
        self.limit = generation_config.max_length - input_ids.size(1)
        draw = drawn if generation_config.do_sample else partial(torch.argmax, dim=-1, keepdim=True)
        self._choose = lambda ids, logits: draw(logits_processor(ids, logits.to(copy=True, dtype=torch.float32)))
        with self._on_stream(input_ids.device), torch.inference_mode(), model._optimize_model_for_decode():
            self._join(numbers, input_ids, positions, StaticCache(inputs[CACHE], seen), logits)
            del logits
            with shared_keys(model, self._cache):
                self._decode(model, most)
        if not len(self):
            self.restart()
        return input_ids

    @contextmanager
    def _on_stream(self, device: torch.device) -> Iterator[None]:
        """While inside, a GPU works in a stream of the batch's own, as a recorded step needs it."""
        if device.type != "cuda":
            yield
            return
        self._stream, outside = self._stream or torch.cuda.Stream(device), torch.cuda.current_stream(device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    def _join(
        self,
        numbers: Sequence[Sequence[int]],
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: StaticCache,
        logits: torch.Tensor,
    ) -> None:
        """Choose the first tokens of completions, and put them behind those that have not ended.

        Args:
            numbers: for each prompt, the numbers of its completions.
            ids: prompts, padded on the left, (prompts, tokens).
            positions: of their first tokens; see `Rows`.
            cache: of the prompts.
            logits: of their first tokens, (prompts, vocabulary).
        """
        counts = cache.seen.sum(1).tolist()
        read = [prompt[len(prompt) - count :] for prompt, count in zip(ids.tolist(), counts, strict=True)]
        rows = [Row(number, prompt, read[prompt], self.step) for prompt, of in enumerate(numbers) for number in of]
        prompts = [row.prompt for row in rows]
        tokens = ids.new_zeros(len(rows), self.limit)
        tokens[:, :1] = self._choose(ids[prompts], logits[prompts])
        lengths = tokens.new_zeros(len(rows))
        further = Rows(tokens, lengths, self._going(tokens[:, :1], lengths), positions[prompts])
        if self._cache is None:
            self.rows, self._rows, self._cache = rows, further, cache
            self._place([], ROOM)
            return
        unfinished = self._collect()
        prompts = sorted({self.rows[place].prompt for place in unfinished})
        self._cache.add(prompts, cache)
        self.rows = [self.rows[place] for place in unfinished]
        for row in self.rows:
            row.prompt = prompts.index(row.prompt)
        for row in rows:
            row.prompt += len(prompts)
        self.rows += rows
        self._rows = self._rows.of(unfinished).and_further(further)
        self._place(unfinished, self._cache.room)

    def _drop_ended(self, room: int) -> None:
        """Keep only completions that have not ended, with room for so many tokens."""
        unfinished = self._collect()
        if unfinished:
            self.rows, self._rows = [self.rows[place] for place in unfinished], self._rows.of(unfinished)
            self._place(unfinished, room)

    def _place(self, rows: list[int], room: int) -> None:
        """Place the completions in new memory; the first were at `rows` before."""
        room = min(room, self.limit)
        self._cache.place(rows, [row.prompt for row in self.rows], self._rows.lengths, room + -room % MULTIPLE)
        self._is_placed_anew = True

    def _collect(self) -> list[int]:
        """Keep the tokens of completions that have ended; return the rows of the others."""
        going = self._rows.going.tolist()
        ended = [place for place, row in enumerate(self.rows) if not going[place] and row.number not in self.ended]
        of_ended = self._rows.of(ended)
        for place, tokens, length in zip(ended, of_ended.tokens.tolist(), of_ended.lengths.tolist(), strict=True):
            self.ended[self.rows[place].number] = tokens[: length + 1]
            self.rows[place].going = False
            if self.turns:
                self.turns.keep(self.rows[place].read + tokens[:length], self._cache, place, in_groups=False)
        return [place for place, goes in enumerate(going) if goes]

    def _decode(self, model: Any, most: int) -> None:
        """Generate tokens until at most `most` completions are unfinished."""
        later = deque[tuple[torch.Tensor, torch.cuda.Event | None]]()
        while len(self) > most:
            longest = self.step - min(row.begun for row in self.rows if row.going)
            if longest >= self._cache.room or len(self) <= FEW * len(self.rows):
                later.clear()
                self._drop_ended(self._cache.room * (2 if longest >= self._cache.room else 1))
                continue
            self._advance(model)
            self.step += 1
            later.append(copied(self._rows.going))
            going = read(*later.popleft()) if len(later) > LATE else None
            for place, row in enumerate(self.rows):
                if self.step - row.begun >= self.limit - 1 or (going and not going[place]):
                    row.going = False
        self._collect()

    def _advance(self, model: Any) -> None:
        """Generate a token of each completion: repeat the recorded step, or do and record it."""
        if self._graph and not self._is_placed_anew:
            self._graph.replay()
            return
        if self.why_not_recorded:
            self._step(model)
            return
        before = [(tensor, tensor.clone()) for tensor in (*self._rows[1:3], *self._cache.states())]
        expected = self._step(model)
        after = [(tensor, tensor.clone()) for tensor in self._rows]  # with the tokens that have been drawn
        put_back(before)
        logits, self.why_not_recorded = tried(lambda: self._record(model))
        if logits is not None and self._graph:
            self._graph.replay()
            distance = float((logits - expected).norm() / expected.norm())
            if not distance <= relative_rounding(model) ** 0.5:
                self.why_not_recorded = f"the recorded one has other logits, by {distance:.1e}"
        if self.why_not_recorded:
            put_back(before)
            self._step(model)
        else:
            put_back(after)
            self._is_placed_anew = False

    def _record(self, model: Any) -> torch.Tensor:
        """Record a step; return the place of its logits."""
        graph, pool = torch.cuda.CUDAGraph(), self._graph and self._graph.pool()
        graph.capture_begin(pool, capture_error_mode="thread_local")  # other threads may compute rewards
        try:
            logits = self._step(model)
        finally:
            graph.capture_end()
        self._graph = graph  # until here the graph before keeps the memory that both use
        return logits

    def _step(self, model: Any) -> torch.Tensor:
        """Generate a token of each completion; return its logits, (rows, vocabulary)."""
        tokens, lengths, going, positions = self._rows
        last = tokens.gather(1, lengths[:, None])
        inputs = {
            "input_ids": last,
            "position_ids": (positions.movedim(0, -1) + lengths)[..., None],
            CACHE: self._cache,
        }
        inputs["attention_mask"] = torch.ones_like(last)  # without it some models read whether a token is padding
        logits = model(**inputs, use_cache=True, return_dict=True).logits[:, -1]
        chosen = torch.where(going[:, None], self._choose(last, logits), last)
        lengths += going
        tokens.scatter_(1, lengths[:, None], chosen)
        going &= self._going(chosen, lengths)
        return logits

    def _going(self, chosen: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return whether completions go on after these tokens, (rows, 1), at these places, (rows)."""
        return (chosen != self.ends).all(1) & (lengths < self.limit - 1)


def put_back(values: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write values into tensors."""
    for tensor, value in values:
        tensor.copy_(value)


def copied(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """Begin to copy a tensor to the host; `read` waits for it."""
    event = torch.cuda.Event() if tensor.is_cuda else None
    copy = tensor.to("cpu", non_blocking=True)
    if event:
        event.record()
    return copy, event


def read(copy: torch.Tensor, event: torch.cuda.Event | None) -> list[Any]:
    """Return the numbers of a copy."""
    if event:
        event.synchronize()
    return copy.tolist()
