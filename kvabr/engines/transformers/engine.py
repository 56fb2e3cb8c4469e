"""The engine protocol on Hugging Face transformers: hole mode, and scoring of continuations.

Methods never modify the caller's tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch

from kvabr.client.warming import warm_engine
from kvabr.engines.adapters import require
from kvabr.engines.transformers.cache import (
    cache_argument,
    is_state,
    new_cache,
    read_cache,
    replace_states,
    rewind,
    whole_cache,
)
from kvabr.engines.transformers.identity import state_of
from kvabr.engines.transformers.resident import RoomyCache, fits
from kvabr.engines.transformers.weight_files import check_finite
from kvabr.types.engine import EngineMode
from kvabr.types.errors import ModelError
from kvabr.types.kv import KVSpec
from kvabr.types.units import computed_shape

CHUNK = 512
"""Tokens per forward pass on a CPU: enough for its matrix units, few enough to bound memory."""
_GPU_CHUNK = 8192
"""Tokens per forward pass on a GPU, which takes as long for one token as for a few hundred."""
_MASK_ELEMENTS = 1 << 28
"""Maximum elements of an attention mask (new tokens times all tokens)."""

SCORE_CHUNK = 128
"""Tokens scored per forward pass: logits over a vocabulary are large."""


class TransformersEngine:
    """A transformers causal language model as an engine (see `kvabr.types.engine.Engine`)."""

    def __init__(self, model: Any, spec: KVSpec, *, context: int, watched: bool = False) -> None:
        """Wrap a model with a context of ``context`` tokens; ``watched``: raise if adapters or weights change later."""
        self.model, self.spec, self.context = model, spec, context
        self._state = state_of(model) if watched else None
        self.mode: EngineMode = "hole"
        self.cache_argument = cache_argument(model)
        self._max_tokens = _GPU_CHUNK
        self._takes_positions = "position_ids" in signature(model.base_model.forward).parameters
        warm_engine(spec, self.device, self.dtype)

    @property
    def vocabulary(self) -> int:
        """Number of token ids, from 0 on."""
        return int(self.model.config.vocab_size)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        device: torch.device = self.model.device
        return device

    @property
    def weights(self) -> int:
        """Number of parameters of the model, to estimate the time of its first prefill."""
        return sum(each.numel() for each in self.model.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """Element type of computation and caches."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    def prefill(self, tokens: Sequence[int], before: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the KV of ``tokens`` after the cache ``before``; see `kvabr.types.engine.Engine.prefill`."""
        _ = self.spec.only
        return self.prefill_classes(tokens, None if before is None else (before,))[0]

    @torch.inference_mode()
    def prefill_classes(
        self, tokens: Sequence[int], before: tuple[torch.Tensor, ...] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Compute the KV of ``tokens``; see `kvabr.types.engine.ClassEngine.prefill_classes`."""
        ids, before, start = self._checked(tokens, before)
        room = self.reside(start + len(tokens))
        if room is not None:
            if before is not None:
                room.place(0, before[0])
            return (room.compute(ids, start).cpu(),)
        cache = self._cache(before)
        self.extend(cache, ids, start)
        return read_cache(cache, self.spec, start, start + len(tokens))

    def reside(self, tokens: int) -> RoomyCache | None:
        """Return memory for a prompt on the device; see `kvabr.types.engine.ResidentEngine.reside`."""
        if not fits(self.spec, tokens, self.dtype, self.device):
            return None
        try:
            return RoomyCache(self.spec, tokens, self.dtype, self.device, self.ids_of, self.extend)
        except RuntimeError:  # out of memory
            return None

    @torch.no_grad()
    def extend(self, cache: Any, ids: torch.Tensor, start: int) -> None:
        """Prefill tokens, [1, token], into a transformers cache of ``start`` tokens, which grows."""
        first, tokens = 0, ids.shape[1]
        while first < tokens:
            size = self.pass_tokens(start + tokens)
            try:
                # Skip the language model's head: a prefill needs no logits.
                self.model.base_model(**self._given(cache, ids[:, first : first + size], start + first))
            except torch.OutOfMemoryError:
                if size <= CHUNK or not rewind(cache, self.spec, start + first):
                    raise
                self._max_tokens = size // 2
            else:
                first += size

    def pass_tokens(self, seen: int) -> int:
        """Return the tokens per forward pass for a prompt of ``seen`` tokens."""
        if self.device.type == "cpu":
            return CHUNK
        return max(CHUNK, min(self._max_tokens, _MASK_ELEMENTS // seen))

    def _given(self, cache: Any, ids: torch.Tensor, start: int) -> dict[str, Any]:
        """Return the arguments for a pass after ``start`` tokens; not all models derive positions from a cache."""
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        moved = {"position_ids": positions} if self._takes_positions else {}
        return {"input_ids": ids, self.cache_argument: cache, "use_cache": True, **moved}

    def score(self, kv: torch.Tensor | None, tokens: Sequence[int]) -> torch.Tensor:
        """Like `score_classes`, for a cache of one layer class."""
        return self.score_classes(None if kv is None else (kv,), tokens)

    @torch.inference_mode()
    def score_classes(self, kv: tuple[torch.Tensor, ...] | None, tokens: Sequence[int]) -> torch.Tensor:
        """Return log-probabilities of the token that follows each of ``tokens``, given the cache ``kv``.

        Returns:
            [len(tokens), vocabulary] float64; row i is the distribution of the token after ``tokens[i]``. Float32
            logits are normalised in float64, so that rounding does not dominate a KL.

        Raises:
            ModelError: the tokens do not fit the model, or ``kv`` is not a cache of this model.
        """
        ids, cache, start = self._begin(tokens, kv)
        out = torch.empty(len(tokens), self.vocabulary, dtype=torch.float64)
        for first in range(0, len(tokens), SCORE_CHUNK):
            given = self._given(cache, ids[:, first : first + SCORE_CHUNK], start + first)
            # Row by row: with a large vocabulary, allocating memory for all rows takes as long as the logarithms.
            for row, logits in enumerate(self.model(**given).logits[0].cpu(), first):
                torch.log_softmax(logits.double(), dim=-1, out=out[row])
        return out

    @torch.inference_mode()
    def answer(self, kv: tuple[torch.Tensor, ...] | None, question: Sequence[int], tokens: int) -> list[int]:
        """Return ``tokens`` most likely ids, one by one, after ``kv`` and a question, even after an end of text."""
        ids, cache, start = self._begin(question, kv)
        answer: list[int] = []
        for _ in range(tokens):
            answer.append(int(self.model(**self._given(cache, ids, start)).logits[0, -1].argmax()))
            start, ids = start + ids.shape[1], ids.new_tensor([answer[-1:]])
            self.check(answer[-1:], start)
        return answer

    def gradient_classes(
        self, kv: tuple[torch.Tensor, ...], tokens: Sequence[int], seed: int = 0
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradient of the model's output with respect to the cache, which weights errors in calibrations.

        Its expected square over next tokens drawn from the model is the Fisher information, which determines how the KL
        divergence grows with errors. So after each of ``tokens``, one next token is sampled; the gradient is that of
        the sum of their log-probabilities.

        Returns:
            Tensors with the shapes of ``kv``, float32.

        Raises:
            ModelError: as for `score`; or the model's output is not finite.
        """
        return self.continue_classes(kv, tokens, seed)[1]

    def continue_classes(
        self, kv: tuple[torch.Tensor, ...], tokens: Sequence[int], seed: int = 0
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Return the results of `prefill_classes` and `gradient_classes` from one forward pass."""
        self.model.requires_grad_(False)
        with torch.enable_grad():
            leaves = tuple(part.detach().to(self.dtype, copy=True).requires_grad_() for part in kv)
            ids, cache, start = self._begin(tokens, leaves)
            replace_states(cache)
            logits = self.model(**self._given(cache, ids, start)).logits[0]
            said = sample_next(logits, seed, self.spec.model)
            with torch.no_grad():
                made = read_cache(cache, self.spec, start, start + len(tokens))
            said.backward()  # type: ignore[no-untyped-call]
        out = tuple(leaf.grad.float() for leaf in leaves if leaf.grad is not None)
        if len(out) < len(leaves):
            raise ModelError(f"{self.spec.model}: the model ignores the cache that it is given")
        return made, out

    @property
    def concurrent(self) -> bool:
        """True if two threads may compute at once.

        False if rotary embeddings depend on length, as transformers changes these in place.
        """
        steady = all(each.kind != "state" and each.rope is not None for each in self.spec.classes)
        return steady and self.device.type == "cpu"

    def check_weights(self) -> None:
        """Raise `ModelError` if any weights are NaN or infinite."""
        for name, weights in self.model.named_parameters():
            if not weights.is_meta:
                check_finite(name, weights.detach())

    def _begin(self, tokens: Sequence[int], before: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor, Any, int]:
        """Return the ids as a batch of one, a transformers cache with a copy of ``before``, and that cache's length."""
        ids, before, start = self._checked(tokens, before)
        return ids, self._cache(before), start

    def _cache(self, before: tuple[torch.Tensor, ...] | None) -> Any:
        return new_cache(self.model, whole=True) if before is None else whole_cache(before, self.spec, self.model)

    def ids_of(self, tokens: Sequence[int], start: int = 0) -> torch.Tensor:
        """Return the ids of tokens that follow ``start`` others, as a batch of one; errors as for `check`."""
        self.check(tokens, start)
        if not start:
            self.check_unchanged()
        return torch.tensor([list(tokens)], dtype=torch.long, device=self.device)

    def _checked(
        self, tokens: Sequence[int], before: tuple[torch.Tensor, ...] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None, int]:
        """Return the ids as a batch of one, the cache before them and its length; raise if the tokens do not fit."""
        parts = self.spec.parts
        if before is None:
            return self.ids_of(tokens), None, 0
        # A cache of states alone does not show the number of tokens.
        start = next((int(kv.shape[-2]) for kv, part in zip(before, parts, strict=False) if not is_state(part)), 0)
        ids = self.ids_of(tokens, start)
        shapes = [computed_shape(part, start) for part in parts]
        given = [tuple(kv.shape) for kv in before]
        if len(given) == len(parts):  # the last of several snapshots counts
            before = tuple(
                kv[..., -part.rows :, :] if is_state(part) and kv.shape[-2] % part.rows == 0 else kv
                for kv, part in zip(before, parts, strict=True)
            )
        if [tuple(kv.shape) for kv in before] != shapes:
            raise ModelError(f"the cache does not fit {self.spec.model}: got the shape {given}, expected {shapes}")
        return ids, before, start

    def check_unchanged(self) -> None:
        """Raise `ModelError` if adapters or weights changed since the engine was created. Takes milliseconds."""
        if self._state is not None and state_of(self.model) != self._state:
            raise ModelError(
                f"the adapters or weights of {self.spec.model} have changed since this engine was created, so its "
                "caches would have a wrong name: call engine_of again, and use the new engine"
            )

    def check(self, tokens: Sequence[int], start: int = 0) -> None:
        """Raise `ModelError` unless there are tokens with valid ids that fit the model after ``start`` others."""
        if not tokens:
            raise ModelError("a prefill needs at least one token")
        if start + len(tokens) > self.context:
            raise ModelError(
                f"{start} + {len(tokens)} tokens do not fit the context of {self.spec.model} ({self.context})"
            )
        if not all(0 <= token < self.vocabulary for token in tokens):
            raise ModelError(f"a token id is outside the vocabulary of {self.spec.model} (0 to {self.vocabulary - 1})")


def sample_next(logits: torch.Tensor, seed: int, model: str) -> torch.Tensor:
    """Sample one token for each row of logits, [token, vocabulary]; return the sum of their log-probabilities.

    The same tokens are sampled on every device. Raise `ModelError` if ``model``'s output is not finite.
    """
    likely = torch.log_softmax(logits.float(), dim=-1)
    chances = likely.detach().cpu()
    if not bool(torch.isfinite(chances).all()):
        raise ModelError(f"{model}: its output is NaN or infinite; its weights are damaged")
    # torch.multinomial draws one random number per token of the vocabulary, which is slow.
    upto = chances.exp().cumsum_(dim=-1)
    drawn = torch.rand((len(upto), 1), generator=torch.Generator().manual_seed(seed)) * upto[:, -1:]
    said = torch.searchsorted(upto, drawn, right=True).clamp_(max=upto.shape[1] - 1)
    return likely.gather(1, said.to(likely.device)).sum()


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Hide transformers' progress bar while weights are loaded."""
    logging = require("transformers").utils.logging
    was = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was:
            logging.enable_progress_bar()
