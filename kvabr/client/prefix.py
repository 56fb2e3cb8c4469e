"""A play for an engine that computes by itself whatever it is not given: what is in place before the first miss counts.

Such an engine takes a prefix of the cache, and computes everything behind it: vLLM, SGLang. So a play of this kind
never waits for an engine and never fails for a group that did not come: it ends when all is in place, when the engine
should begin to compute the rest so that the deadline is met, or at the deadline, and hands over the groups before the
first that is missing. The player protects the front (mode ``suffix``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvabr.abr.cache_first import kept_first
from kvabr.abr.ladder import Ladder
from kvabr.abr.plugins import load_estimator, load_policy
from kvabr.client import allocator as room
from kvabr.client.driver import LIVE, Driver
from kvabr.client.executors import decoders
from kvabr.client.lookup import Found
from kvabr.client.orchestrator import prepare
from kvabr.client.peer_history import priors_at
from kvabr.client.result import Clock, PlayOptions
from kvabr.client.shared_bandwidth import estimating
from kvabr.codec.profile import Profile
from kvabr.player.actions import Recompute
from kvabr.player.assembler import Assembler, Verdict
from kvabr.player.session import Session
from kvabr.quic.interface import Connection, ConnectionStats, Download
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import PlayError, UsageError
from kvabr.types.naming import TrackNamespace

_LEAST_SHARE = 0.05
"""Share of the deadline that a play is given even after a lookup that took longer: it gets what comes at once."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """What a play brought before its first miss."""

    kv: torch.Tensor
    """Cache of `tokens` tokens from token `first` on, [layer, K/V, head, token, dim]."""
    first: int
    """The first token of the first group that was played: the engine had everything before it, or nothing was."""
    tokens: int
    """Tokens in place, 0 if not even the first group is."""
    wanted: int
    """Tokens that were asked for, from `first` on."""
    coverage: tuple[str, ...]
    """Track of each group in place."""
    loss: float
    """Expected loss of these groups, nats per generated token."""
    bytes_fetched: int
    bytes_wasted: int
    seconds: float
    """From the call to the end of the play."""
    cut: str | None
    """Why it is not all that was asked for; None if it is."""


def rest_of(catalog: Catalog, groups: int) -> Catalog:
    """The catalog of what lies behind the first ``groups`` groups, numbered from 0 again.

    Raises:
        UsageError: that is nothing.
    """
    if not 0 <= groups < catalog.groups:
        raise UsageError(f"what is behind {groups} of {catalog.groups} groups cannot be played")
    if not groups:
        return catalog
    tracks = tuple(
        replace(
            track,
            bytes=track.bytes[groups:],
            loss=track.loss[groups:],
            digests=track.digests[groups:],
            measured=None,
        )
        for track in catalog.tracks
    )
    tokens = catalog.tokens - groups * catalog.spec.group_tokens
    return replace(catalog, tokens=tokens, chunks=catalog.chunks[groups:], tracks=tracks, mixes=())


def cost_behind(cost: PrefillCost, tokens: int) -> PrefillCost:
    """What a prefill costs when ``tokens`` tokens are always before those that are counted as before it."""
    return replace(cost, per_token_s=cost.per_token_s + 2.0 * cost.attention_s * tokens)


async def play_prefix(
    origin: Connection,
    found: Found,
    options: PlayOptions,
    *,
    skip: int = 0,
    behind: int = 0,
) -> Prefix:
    """Play what was found, and hand over what is in place when the time is up.

    Args:
        origin: where to fetch; any number of plays may run on one connection. Cancelling this cancels its downloads.
        found: from a lookup.
        options: how to play. ``deadline_s`` counts from this call; ``cost`` must be there, since the player protects
            the front by it; ``recompute``, ``mode``, ``out`` and ``watch`` are not looked at.
        skip: leading groups that the engine has already.
        behind: tokens of the prompt that no cache covers, which the engine computes after the play: their time comes
            out of the deadline.

    Raises:
        UsageError: arguments that make no sense.
        FormatError: none of the asset's tracks can be decoded here.
        PlayError: there is no memory for the cache.
        PolicyError: from the policy or the estimator.
    """
    clock = Clock(options.deadline_s)
    if options.cost is None:
        raise UsageError("to play a prefix, say what a prefill costs the engine")
    prepared = await prepare(origin, found, options, clock)
    whole = prepared.ladder.catalog
    assembler = _FrontAssembler(whole, prepared.profile, skip, options.dtype)
    catalog = rest_of(whole, skip)
    ladder, first = prepared.ladder, skip * catalog.spec.group_tokens
    if skip:
        ladder = await asyncio.get_running_loop().run_in_executor(decoders(), Ladder, catalog)
    rest_s = min(options.deadline_s / 2, options.cost.seconds(whole.tokens, behind))
    wanted_s = max(_LEAST_SHARE * options.deadline_s, clock.left() - options.guard_s - rest_s)
    shifted = _Shifted(origin, skip) if skip else origin
    policy = load_policy(options.policy)()
    if policy.computes:
        raise UsageError(f"policy {options.policy} has the engine compute from the front, which this engine cannot do")
    policy = kept_first(policy, catalog, shifted.at_hand)
    give_up_after = max(1.0, (options.patience * options.deadline_s - clock.now()) / wanted_s)
    own = load_estimator(options.estimator or policy.estimator)()
    # By the origin itself: it knows which link it is, which all plays of this process share.
    with estimating(origin, own, priors_at(options.priors)) as estimator:
        session = Session(
            ladder,
            wanted_s,
            policy,
            estimator,
            cost=cost_behind(options.cost, first),
            mode="suffix",
            config=replace(LIVE, give_up_after=give_up_after),
            log=options.log,
        )
        driver = _FrontDriver(session, shifted, catalog, assembler)
        try:
            record = await driver.run()
        finally:
            coverage = assembler.take_front()
    if options.priors is not None:
        asyncio.get_running_loop().run_in_executor(decoders(), priors_at(options.priors).save)
    tokens = min(len(coverage) * catalog.spec.group_tokens, catalog.tokens)
    cut = None
    if len(coverage) < catalog.groups:
        cut = driver.cut or record.gave_up or "the play ended"
    loss = sum(catalog.track(track).loss[group] for group, track in enumerate(coverage))
    return Prefix(
        kv=assembler.out[:, :, :, first : first + tokens],
        first=first,
        tokens=tokens,
        wanted=catalog.tokens,
        coverage=coverage,
        loss=loss,
        bytes_fetched=record.bytes_fetched,
        bytes_wasted=record.bytes_wasted,
        seconds=clock.now(),
        cut=cut,
    )


class _FrontDriver(Driver):
    """Ends a play where another driver would have an engine compute."""

    cut: str | None = None

    def _tell(self, event: Callable[..., None], *arguments: Any) -> None:
        """End as well when there is nothing to wait for but the moment at which an engine would have to begin."""
        super()._tell(event, *arguments)
        session = self._session
        lane = session._lane  # noqa: SLF001  # the one thing that a play of this kind does otherwise
        if self._over.done() or lane is None or not lane.waiting():
            return
        if not session.view.in_flight and not session._decoding:  # noqa: SLF001
            self.cut = self.cut or "the groups behind cannot be had, or are sooner computed"
            self._over.set_result(None)

    def _compute(self, action: Recompute) -> None:
        self.cut = f"groups {action.first} to {action.last - 1} are sooner computed than fetched"
        if not self._over.done():
            self._over.set_result(None)


class _FrontAssembler(Assembler):
    """Counts groups from the first that is played, and gives away what is in place before the first hole."""

    def __init__(self, catalog: Catalog, profile: Profile | None, skip: int, dtype: torch.dtype | None) -> None:
        """Make room for the whole cache; what is skipped is never touched, so it takes no memory."""
        try:
            self.out = room.empty(catalog.spec.shape(catalog.tokens), dtype or catalog.spec.torch_dtype)
        except RuntimeError as error:
            raise PlayError(f"no memory for a cache of {catalog.fp16_bytes:,} bytes: {error}") from error
        super().__init__(catalog, profile, out=self.out)
        self._skip = skip

    @property
    def coverage(self) -> tuple[str | None, ...]:
        """As the session counts groups."""
        return super().coverage[self._skip :]

    def put(self, group: int, track: str, frame: bytes | memoryview) -> Verdict:
        """As the session counts groups."""
        return super().put(group + self._skip, track, frame)

    def take_front(self) -> tuple[str, ...]:
        """Tracks of the groups before the first hole; nothing is accepted afterwards, nor half written now."""
        with self._lock:
            self._taken = True
        self._kept.clear()
        self._spare.clear()
        front: list[str] = []
        for track in self.coverage:
            if track is None:
                break
            front.append(track)
        return tuple(front)


class _Shifted(Connection):
    """Another connection, on which groups are counted from a later one on."""

    def __init__(self, inner: Connection, groups: int) -> None:
        self._inner, self._groups = inner, groups
        self.backend, self.protocol = inner.backend, inner.protocol

    def fetch(
        self, namespace: TrackNamespace, track: str, group: int = 0, *, priority: int = 128, limit: int
    ) -> Download:
        return self._inner.fetch(namespace, track, group + self._groups, priority=priority, limit=limit)

    @property
    def peer(self) -> str | None:
        return self._inner.peer

    def expect(self, namespace: TrackNamespace, tracks: Iterable[str]) -> None:
        self._inner.expect(namespace, tracks)

    def identify(self, namespace: TrackNamespace, track: str, digests: Sequence[str]) -> None:
        """Of whole tracks, as the origin counts groups."""
        self._inner.identify(namespace, track, digests)

    def at_hand(self, namespace: TrackNamespace, track: str) -> Collection[int]:
        return [group - self._groups for group in self._inner.at_hand(namespace, track) if group >= self._groups]

    @property
    def waits_its_turn(self) -> bool:
        return self._inner.waits_its_turn

    def stats(self) -> ConnectionStats:
        return self._inner.stats()

    @property
    def closed(self) -> bool:
        return self._inner.closed

    @property
    def going_away(self) -> bool:
        return self._inner.going_away

    @property
    def trouble(self) -> str | None:
        return self._inner.trouble

    async def answers(self, within_s: float) -> bool:
        return await self._inner.answers(within_s)

    async def close(self) -> None:
        """The connection is not ours to close."""
