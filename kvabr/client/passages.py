"""Find the passages of a prompt by name, all at once, and join them into one catalog.

The engine computes missing and unusable passages, and the text between passages.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass

from kvabr.blend.selectors import load_selector
from kvabr.client.lookup import Found, catalog_limit, fetch_catalog
from kvabr.client.options import PlayOptions
from kvabr.client.token_recompute import TokenRecompute
from kvabr.player.session_types import BlendGoal
from kvabr.transfer.interface import Connection
from kvabr.types.catalog import Catalog
from kvabr.types.engine import BlendEngine, Engine
from kvabr.types.errors import ForeignError, FormatError, NotFoundError, TransportError, UsageError
from kvabr.types.events import PassageRefused
from kvabr.types.joined import join, joinable
from kvabr.types.kv import KVSpec
from kvabr.types.naming import TrackNamespace
from kvabr.types.passage import Exact, Part, Passage, check_movable, check_parts, passage_chain


async def find_passages(
    origin: Connection,
    passages: Iterable[Passage],
    spec: KVSpec,
    *,
    salt: bytes = b"",
    refused: Callable[[Passage, str], None] = lambda *_: None,
) -> dict[Passage, Found]:
    """Return the usable passages at an origin, requested in one round trip.

    ``refused`` receives the reason for each unusable one. If no passage was found, raises the `TransportError` or
    `FormatError` of a failed lookup, if any.
    """
    wanted = list(dict.fromkeys(passages))
    lookups = (_find(origin, each, spec, salt) for each in wanted)
    answers = await asyncio.gather(*lookups, return_exceptions=True)
    found = {passage: answer for passage, answer in zip(wanted, answers, strict=True) if isinstance(answer, Found)}
    for passage, answer in zip(wanted, answers, strict=True):
        if isinstance(answer, Found | NotFoundError):
            continue
        if not isinstance(answer, TransportError | FormatError) or not found:
            raise answer
        refused(passage, str(answer) or type(answer).__name__)
    return found


async def _find(origin: Connection, passage: Passage, spec: KVSpec, salt: bytes) -> Found:
    chunks = passage_chain(
        passage.ids, model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens, salt=salt
    )
    name = TrackNamespace(spec.model, chunks[-1])
    found = await fetch_catalog(origin, name, limit=catalog_limit(len(chunks)))
    catalog = found.catalog
    if catalog.passage is None or catalog.tokens != len(passage.ids) or catalog.chunks != tuple(chunks):
        raise ForeignError(f"the origin's asset {catalog.namespace.prompt[:12]}... is not the passage of that name")
    if catalog.spec.digest() != spec.digest():
        raise ForeignError(f"the origin's passage is of {catalog.spec.summary}, ours of {spec.summary}")
    return found


@dataclass(frozen=True, slots=True)
class PassagePrompt:
    """A prompt in parts, to play."""

    parts: tuple[Part, ...]
    spec: KVSpec
    options: PlayOptions
    question: tuple[int, ...]
    """Ids of the question; attention to it selects the tokens to recompute."""
    share: float | None
    """Fraction of the passages' tokens to recompute; None: the fraction that pays off."""

    @classmethod
    def of(
        cls,
        parts: Sequence[Part] | None,
        tokens: Sequence[int],
        model: KVSpec | str | None,
        engine: Engine | None,
        options: PlayOptions,
        question: Sequence[int] | None,
        share: float | None,
    ) -> PassagePrompt | None:
        """Return the prompt in parts from a play's arguments, or None; raise `UsageError` if wrong."""
        if parts is None:
            if question is not None or share is not None:
                raise UsageError("question and share are for prompts in parts")
            return None
        if len(tokens):
            raise UsageError("give the prompt as tokens or in parts, not both")
        spec = model if isinstance(model, KVSpec) else None if engine is None else engine.spec
        if engine is None or spec is None:
            raise UsageError("a prompt with passages needs an engine: it computes the text between them")
        if (options.mode or engine.mode) != "hole":
            raise UsageError(
                "a prompt with passages needs an engine that can compute any group (mode 'hole'), such as "
                "transformers; in vLLM they are played with kv_transfer_params; SGLang and LMCache cannot play them"
            )
        try:
            check_movable(spec)
        except FormatError as error:
            raise UsageError(str(error)) from error
        whole = check_parts(parts)
        selecting = _question(whole[-1], engine, options, question, share)
        prompt = cls(whole, spec, options, selecting, share)
        vocabulary = getattr(engine, "vocabulary", None)
        if vocabulary is not None and (beyond := max((*prompt.tokens, *selecting))) >= vocabulary:
            raise UsageError(f"{spec.model} has no token {beyond:,}: its vocabulary ends at {vocabulary - 1:,}")
        context, length = getattr(engine, "context", None), len(prompt.tokens)
        if context is not None and length > context:
            raise UsageError(
                f"the parts have {length:,} tokens in total, more than the context of {spec.model} ({context:,}): "
                "leave some out"
            )
        _ = prompt.goal  # checks the share
        return prompt

    @property
    def goal(self) -> BlendGoal:
        """The session's goal."""
        return BlendGoal(self.share, len(self.question), self.options.joined_loss_limit)

    def recompute(self, catalog: Catalog, engine: Engine | None) -> TokenRecompute | None:
        """Return the play's token recomputation, or None without a question or a `BlendEngine`."""
        if not self.question or not isinstance(engine, BlendEngine):
            return None
        return TokenRecompute(engine, catalog, self.tokens, self.question, load_selector(self.options.selector))

    @property
    def tokens(self) -> list[int]:
        """Ids of the whole prompt."""
        return [token for part in self.parts for token in part.ids]

    async def find(self, origin: Connection) -> tuple[Found | None, KVSpec]:
        """Return the joined passages at an origin, or None; errors as `find_passages`."""
        passages, salt = [part for part in self.parts if isinstance(part, Passage)], self.options.salt
        found = await find_passages(origin, passages, self.spec, salt=salt, refused=self._refused)
        catalogs = {passage: one.catalog for passage, one in found.items()}
        usable = joinable(catalogs, self.options.joined_loss_limit, self._refused)
        catalog = join(self.parts, usable, self.spec)
        digests = "".join(one.sha256 for passage, one in found.items() if passage in usable)
        joined = None if catalog is None else Found(catalog, hashlib.sha256(digests.encode()).hexdigest())
        return joined, self.spec

    def _refused(self, passage: Passage, reason: str) -> None:
        self.options.note(PassageRefused(0.0, passage.name(self.spec, self.options.salt).prompt, reason))


def _question(
    last: Part, engine: Engine, options: PlayOptions, question: Sequence[int] | None, share: float | None
) -> tuple[int, ...]:
    if question is not None and not isinstance(question, Sized):
        raise UsageError("the question must be a sequence of token ids")
    if question is not None and not len(question):
        raise UsageError("the question is empty; leave it out to use the text at the end of the prompt")
    able = isinstance(engine, BlendEngine)
    if share:
        if options.after is not None:
            raise UsageError("upgrades would overwrite recomputed tokens: give share or after, not both")
        if not able:
            raise UsageError("this engine cannot recompute single tokens; with transformers, use `blend_engine`")
        if question is None and not isinstance(last, Exact):
            raise UsageError("share needs a question: give a question, or end the prompt with one")
    if options.after is not None or share == 0 or not able:
        return ()
    return Exact(tuple(question)).ids if question is not None else last.ids if isinstance(last, Exact) else ()
