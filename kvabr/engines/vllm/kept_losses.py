"""What requests are served with that was played with losses: it is not kept behind them in vLLM's prefix cache.

vLLM gives the blocks of one request to every later one that begins with the same tokens, for as long as it has room.
A play in a bad minute would answer all of them. So a play that loses more than `VllmSettings.keep_loss` leaves
nothing: when its request ends, its blocks, and those that were computed behind them, are taken out of the prefix cache.

While the request runs, others may share its blocks if they would be played as well, by the same deadline or a shorter
one. They are counted, are told so, and leave nothing either. Who wants better has the blocks taken out at once, and is
asked for again: then vLLM has nothing for it.

The losses of plays that stay add up: the next turn of a conversation is played behind blocks that were played in the
one before. What such a play leaves is its own loss, and that of what it found; together they stay within the limit.

Pure: no vLLM, no clock, no threads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvabr.engines.vllm.caches import ABSENT_BLOCK
from kvabr.engines.vllm.requests import apart, media_of, unfit
from kvabr.engines.vllm.stats import REQUEST_LOSS, ConnectorCounts
from kvabr.engines.vllm.windows import Tables

_MOST_LEFT = 4096
"""Plays within the limit that are remembered."""


@dataclass(slots=True)
class _Served:
    """A request that was played, or shares blocks of one that was."""

    tokens: Sequence[int]
    """Those of the prompt; of one that shares blocks, up to these at least."""
    apart: object
    """What tells its blocks from others in vLLM's prefix cache, besides tokens and media."""
    media: tuple[tuple[object, int], ...]
    """Those of its prompt, and the tokens that they begin at."""
    deadline_s: float
    """The shortest deadline of the plays that filled its blocks."""
    first: int
    """First token that was loaded, or is shared."""
    loaded: int = 0
    loss: float = 0.0
    """Expected loss of its own play, nats per generated token."""
    worst: float = 0.0
    """Loss of that play for a request that shares nothing behind it."""
    before: float = 0.0
    """What was lost, within the limit, in blocks that it found before what was loaded."""
    begins: object = None
    """vLLM's hash of the first block that was loaded; None: it is not known."""
    shared: float = 0.0
    """Loss of the play of which it shares blocks, above the limit; 0: it shares none."""
    blocks: set[int] = field(default_factory=set)
    """Those that may be in the prefix cache."""
    ran: bool = False
    """Whether a step has computed some of it while it shared blocks: what it has said depends on them."""
    unseen: int = 0
    """Tokens scheduled since the blocks were noted."""
    hidden: bool = False
    """Whether its first blocks were taken out of the prefix cache, so that no one shares any."""

    @property
    def leaves(self) -> float:
        """What a request loses that shares its blocks."""
        return max(self.before + self.worst, self.shared)


class KeptLosses:
    """The requests of one engine."""

    def __init__(
        self,
        limit: float,
        blocks: Sequence[int],
        evict: Callable[[set[int]], None],
        counts: ConnectorCounts,
    ) -> None:
        """Start without requests.

        Args:
            limit: most loss that stays in the prefix cache, nats per generated token.
            blocks: tokens in a block of each of the engine's tables.
            evict: takes blocks out of the prefix cache, given their ids.
            counts: counters.
        """
        self._limit, self._sizes, self._evict, self._counts = limit, tuple(blocks), evict, counts
        self._served: dict[str, _Served] = {}
        self._left: OrderedDict[object, float] = OrderedDict()
        """What requests lose that begin with a block, by vLLM's hash of it: of plays that stayed, the latest."""
        self._lossy: dict[str, _Served] = {}
        """Those of which nothing is kept."""

    def begin(self, request: Any, deadline_s: float, first: int, loaded: int, tables: Sequence[Sequence[int]]) -> None:
        """Note a load: ``loaded`` tokens from ``first`` on, played by this deadline, into blocks of a request."""
        served = self._served.setdefault(request.request_id, _new(request, deadline_s, first))
        served.first, served.deadline_s = min(first, served.first), min(deadline_s, served.deadline_s)
        served.loaded, served.hidden = loaded, False
        served.blocks |= self._ids(served, tables)
        hashes, at = getattr(request, "block_hashes", ()), first // min(self._sizes)
        if len(set(self._sizes)) == 1 and at < len(hashes):  # else a hash may be of several blocks
            served.before = max((self._left.get(each, 0.0) for each in hashes[:at]), default=0.0)
            served.begins = hashes[at]

    def lost(self, name: str, loss: float, worst: float) -> None:
        """Note what a request's play is expected to lose.

        Args:
            name: the request's id.
            loss: for the request itself.
            worst: for one that shares nothing of what is computed behind it.
        """
        served = self._served.get(name)
        if served is None:
            return
        served.loss, served.worst = max(loss, served.loss), max(worst, served.worst)
        if served.before + served.worst > self._limit and served.worst > 0 and name not in self._lossy:
            self._lossy[name] = served
            self._counts.add("plays_not_kept")

    def may_share(self, request: Any, computed: int, deadline_s: float) -> bool:
        """Return whether a request may have what vLLM has of its first ``computed`` tokens; else vLLM has less now.

        ``deadline_s`` is what its own play would have, infinite if it wants none.
        """
        name, spared, shared = request.request_id, False, None
        for other, lossy in self._lossy.items() if unfit(request) is None else ():  # else it has blocks of its own
            if other == name or lossy.hidden or not self._reaches(request, computed, lossy):
                continue
            if deadline_s > lossy.deadline_s:
                self._evict(lossy.blocks)
                lossy.hidden = spared = True
            elif shared is None or lossy.leaves > shared.leaves:
                shared = lossy
        if spared:
            self._counts.add("requests_spared")
            return False
        own = self._served.get(name)
        if shared is not None:
            if own is None:
                own = self._served[name] = _Served(
                    shared.tokens, shared.apart, shared.media, shared.deadline_s, shared.first
                )
            own.first, own.shared = min(own.first, shared.first), shared.leaves
            own.deadline_s = min(own.deadline_s, shared.deadline_s)
            self._lossy[name] = own
        elif own is not None and own.shared and not own.ran:  # they are gone by now
            own.shared = 0.0
            if not own.loaded:
                self._forget(name)
        return True

    def step(self, scheduled: Mapping[str, int], tables: Tables) -> None:
        """Note the blocks of requests of which a step computes so many tokens."""
        for name in self._lossy.keys() & scheduled.keys():
            lossy = self._lossy[name]
            lossy.ran = True
            lossy.unseen += scheduled[name]
            if not lossy.blocks or lossy.unseen >= min(self._sizes):
                lossy.blocks |= self._ids(lossy, tables(name))
                lossy.unseen = 0
                if lossy.hidden:  # others have computed the tokens before these since, and would share them
                    self._evict(lossy.blocks)

    def over(self, name: str, tables: Sequence[Sequence[int]]) -> dict[str, float] | None:
        """End a request, given its block tables; return what it was served with, None if nothing was loaded."""
        served = self._served.get(name)
        if served is None:
            return None
        if name in self._lossy:
            self._evict(served.blocks | self._ids(served, tables))
        elif served.worst > 0 and served.begins is not None:
            self._left[served.begins] = served.before + served.worst
            self._left.move_to_end(served.begins)
            if len(self._left) > _MOST_LEFT:
                self._left.popitem(last=False)
        self._forget(name)
        if served.shared:
            self._counts.add("requests_shared_lossy")
        loss = served.before + served.loss + served.shared
        self._counts.note(REQUEST_LOSS, loss)
        return {"tokens_loaded": served.loaded, "loss": loss, "shared_loss": served.shared}

    def _forget(self, name: str) -> None:
        self._served.pop(name, None)
        self._lossy.pop(name, None)

    def _reaches(self, request: Any, computed: int, lossy: _Served) -> bool:
        """Return whether the first ``computed`` tokens of a request go into blocks that are lossy."""
        size = min(self._sizes)
        end = (lossy.first // size + 1) * size
        if computed < end or request.prompt_token_ids is None or apart(request) != lossy.apart:
            return False
        if [each for each in media_of(request) if each[1] < end] != [each for each in lossy.media if each[1] < end]:
            return False
        # After a preemption, what vLLM has may go on behind the prompt.
        tokens = getattr(request, "all_token_ids", request.prompt_token_ids)
        return bool(tokens[end - 1] == lossy.tokens[end - 1] and tokens[:end] == lossy.tokens[:end])

    def _ids(self, lossy: _Served, tables: Sequence[Sequence[int]]) -> set[int]:
        pairs = zip(tables, self._sizes, strict=True)
        return {block for table, size in pairs for block in table[lossy.first // size :]} - {ABSENT_BLOCK}


def _new(request: Any, deadline_s: float, first: int) -> _Served:
    return _Served(request.prompt_token_ids, apart(request), media_of(request), deadline_s, first)
