"""Expected time to the first token for each place: prefill locally, prefill remotely, or fetch a prefix.

Times are in seconds from now. For a prompt of ``n`` tokens, ``h`` are cached here and ``r`` at the other site (whole
groups; the last token is always computed).

- ``local``: local queue + prefill of n - h tokens.
- ``remote``: half a round trip, the remote queue, and prefill of n - r tokens there; tokens that are missing here are
  sent *during* the prefill. Since no token takes less time than the previous one, the last group arrives at the latest
  of three times: when it is computed and sent; when all computed tokens are sent; when everything is sent, including
  the remotely cached part. Then follow half a round trip, decoding of the last group, and the engine's step for the
  first token.
- ``both``: like ``remote``, but the first k tokens are computed here and not sent. k is chosen so that both sites end
  together, or smaller if that is as fast. It is only a plan, as the player stops where both meet.
- ``fetch``: the remotely cached part beyond h is fetched, and n - r tokens are prefilled here.

`kvabr.abr.planner` uses a catalog, but ignores queues and remote prefill. With equal knowledge both agree within 3 %
(``tests/lab/route/test_forecast.py``).

Requests use the link in the order of routing: bytes of earlier requests are sent first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal, Self

from kvabr.abr.ladder import Ladder
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import UsageError

Place = Literal["local", "remote", "both", "fetch"]
LOCAL: Place = "local"
REMOTE: Place = "remote"
BOTH: Place = "both"
FETCH: Place = "fetch"
PLACES = (LOCAL, REMOTE, BOTH, FETCH)
_MIN_GAIN = 0.02
"""Minimum fraction of time that `BOTH` must save, since it occupies workers of both sites."""
MAX_TOKENS = 1 << 27
"""Maximum length of a prompt, as in a catalog: a million groups of 128 tokens."""


def _check_amounts(what: str, holder: object, max_count: float = 1e15) -> None:
    for field in fields(holder):  # type: ignore[arg-type]  # every caller is a dataclass
        value = getattr(holder, field.name)
        if isinstance(value, int | float) and not 0 <= value <= max_count:
            raise UsageError(f"{what}: {field.name} must be 0 to {max_count:g}, got {value}")


@dataclass(frozen=True, slots=True)
class PrefillSite:
    """A prefill site's state for one request."""

    cost: PrefillCost
    queue_s: float = 0.0
    """Seconds until a worker could start this request."""
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        _check_amounts("site", self)


@dataclass(frozen=True, slots=True)
class RouteLink:
    """The link's state for one request."""

    rate: float
    """Expected payload rate, bytes/s; 0 if unknown."""
    rtt_s: float = 0.0
    """Round trip time including processing at both ends, seconds."""
    backlog_bytes: float = 0.0
    """Bytes of earlier requests that could be sent but have not arrived."""
    live: bool = True
    """True if groups are sent during the prefill, False if all are sent at its end."""
    coming: tuple[tuple[float, float, float], ...] = ()
    """Later transfers of earlier requests: start and end in seconds, and size in bytes."""
    bound: float | None = None
    """Lower bound of the rate in bytes/s; None: same as ``rate``."""

    def __post_init__(self) -> None:
        _check_amounts("link", self)
        if self.bound is not None and self.bound > self.rate:
            raise UsageError(
                f"link: the lower bound must be at most the expected {self.rate:g} bytes/s, got {self.bound:g}"
            )
        for begin, end, nbytes in self.coming:
            if not 0 <= begin <= end < math.inf or not 0 <= nbytes < math.inf:
                raise UsageError(
                    f"link: bytes and times must be 0 or more, and the end not before the begin, got {nbytes} bytes "
                    f"from {begin} to {end} s"
                )

    def seconds(self, nbytes: float) -> float:
        """Return the seconds to transfer ``nbytes``; infinity if the rate is unknown."""
        if nbytes <= 0:
            return 0.0
        return nbytes / self.rate if self.rate > 0 else math.inf

    @property
    def free_s(self) -> float:
        """Seconds until the link can start to send a new request."""
        return max(self.rtt_s / 2, self.seconds(self.backlog_bytes))

    def through(self, *own: tuple[float, float]) -> float:
        """Return when the last of these parts, given as (time, bytes), has been sent after all earlier requests."""
        if self.rate <= 0:
            return math.inf if any(nbytes > 0 for _, nbytes in own) else max(at for at, _ in own)
        marks = [(at, nbytes, 0.0) for at, nbytes in own]
        for begin, end, nbytes in self.coming:
            if end > begin:
                pace = nbytes / (end - begin)
                marks += [(begin, 0.0, pace), (end, 0.0, -pace)]
            else:
                marks.append((begin, nbytes, 0.0))
        marks.sort()
        last = max(at for at, _ in own)
        now, left, pace = 0.0, self.backlog_bytes, 0.0
        for at, nbytes, more in marks:
            after = left + (pace - self.rate) * (at - now)
            # This request is last in the queue, so its transfer ends when the queue is empty.
            if now >= last and at > now and after <= 0:
                return now + left / (self.rate - pace)
            now, left, pace = at, max(0.0, after) + nbytes, pace + more
        return now + left / self.rate


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Size of a prompt's cache on the link at the lowest acceptable quality."""

    per_token: float
    constant: float = 0.0
    """Bytes of sliding windows and states, which are complete only at the prompt's end."""
    group_tokens: int = 128
    decode_s: float = 0.0
    """Decode seconds per token, using all threads."""
    loss: float = 0.0
    """Expected loss, nats per generated token."""

    def __post_init__(self) -> None:
        _check_amounts("cache", self)
        if not (self.per_token > 0 and self.group_tokens >= 1):
            raise UsageError(
                f"cache: bytes per token and tokens per group must be positive, got {self.per_token} and "
                f"{self.group_tokens}"
            )

    @classmethod
    def of_catalog(cls, catalog: Catalog, max_loss: float, *, decoders: int = 1) -> Self:
        """Return the smallest size at which a catalog's cache has an expected loss of at most ``max_loss``.

        The catalog is that of a typical asset; the quality floor ``max_loss`` is in nats per generated token.

        Raises:
            UsageError: No mixture of the tracks reaches the floor.
        """
        if not max_loss >= 0:
            raise UsageError(f"the quality floor must be 0 or more nats per token, got {max_loss}")
        catalog = catalog.to_play
        ladder = Ladder(catalog)
        chosen = [hull[0] for hull in ladder.layered]
        loss = math.fsum(option.loss for option in chosen)
        for step in ladder.layered_steps:
            if loss <= max_loss:
                break
            chosen[step.group] = next(one for one in ladder.layered[step.group] if one.track == step.to)
            loss = math.fsum(option.loss for option in chosen)
        if loss > max_loss:
            raise UsageError(
                f"no tracks of this asset lose at most {max_loss:g} nats per token; its best lose {loss:.3g}: give a "
                "higher floor, or publish better tracks"
            )
        ends_s = sum(catalog.track(option.track).decode_s * catalog.share(g) for g, option in enumerate(chosen))
        whole = sum(option.bytes for group, option in enumerate(chosen) if not _lasts(catalog, group))
        constant = sum(option.bytes for group, option in enumerate(chosen) if _lasts(catalog, group))
        if not whole:
            # There are only windows and states, so the size hardly depends on the prompt's length.
            whole, constant = constant, 0
        tokens = catalog.tokens
        return cls(whole / tokens, constant, catalog.spec.group_tokens, ends_s / tokens / max(1, decoders), loss)

    def scaled(self, factor: float) -> CacheSize:
        """Return the size for a model with ``factor`` times as many cache elements."""
        return replace(
            self,
            per_token=self.per_token * factor,
            constant=self.constant * factor,
            decode_s=self.decode_s * factor,
        )

    def whole_groups(self, tokens: int, prompt: int) -> int:
        """Return how many of ``tokens`` cached tokens a prompt of ``prompt`` tokens can use: whole groups."""
        return min(tokens, prompt - 1) // self.group_tokens * self.group_tokens

    def last_group(self, tokens: int) -> int:
        """Return the number of tokens in the last group of ``tokens``."""
        return (tokens - 1) % self.group_tokens + 1


def _lasts(catalog: Catalog, group: int) -> bool:
    """Return True if a play needs only the end of the class of a group."""
    if catalog.every_token:
        return False
    return catalog.spec.parts[catalog.unit(group).part].only.kind not in ("full", "latent")


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast for a request at one place."""

    place: Place
    ttft_s: float
    """Seconds to the first token; infinite if the link rate is unknown."""
    limit: str
    queue_s: float
    prefill_s: float
    """Seconds that the place's prefill worker is busy; for `BOTH`, the remote worker."""
    bytes: float
    front_tokens: int = 0
    """For `BOTH`: tokens to compute here."""
    front_s: float = 0.0
    """For `BOTH`: seconds that a local worker is busy."""
    ready_s: float = 0.0
    """Time at which the first group can be sent, seconds."""
    computed_s: float = 0.0
    """Time at which the last group can be sent, seconds."""
    last_s: float = 0.0
    tail_s: float = 0.0
    """Seconds from the arrival of the last group until the first token."""
    others_s: float = 0.0
    """Expected additional delay of other requests, compared with the place that delays them least."""
    bound_s: float = math.inf
    """`ttft_s` at the link's lower bound."""

    @property
    def price_s(self) -> float:
        """Total cost over all requests, seconds."""
        return self.ttft_s + self.others_s


def forecasts(
    tokens: int, local: PrefillSite, remote: PrefillSite, link: RouteLink, cache: CacheSize, *, both: bool = True
) -> tuple[Forecast, ...]:
    """Return the forecast of every sensible place; the first is local prefill.

    ``both`` is True if the local engine can compute the start of a prompt that arrives from its end.

    Raises:
        UsageError: The prompt is empty or too long.
    """
    if not 1 <= tokens <= MAX_TOKENS:
        raise UsageError(f"the prompt must have 1 to {MAX_TOKENS} tokens, got {tokens}")
    here = cache.whole_groups(local.cached_tokens, tokens)
    there = cache.whole_groups(remote.cached_tokens, tokens)
    ways = _Ways(tokens, here, there, local, remote, link, cache)
    found = [ways.local(), ways.remote()]
    if both and (front := ways.front()) is not None:
        split = ways.both(front)
        if split.ttft_s <= (1 - _MIN_GAIN) * min(one.ttft_s for one in found):
            found.append(split)
    if there > here:
        found.append(ways.fetch())
    if link.bound is None or link.bound == link.rate:
        return tuple(replace(one, bound_s=one.ttft_s) for one in found)
    sure = replace(ways, link=replace(link, rate=link.bound, bound=None))
    late = {LOCAL: sure.local, REMOTE: sure.remote, FETCH: sure.fetch}
    # On a slower link, the two sites meet later in the prompt.
    bounds = (late[one.place]() if one.place in late else sure.both(sure.front() or one.front_tokens) for one in found)
    return tuple(replace(one, bound_s=bound.ttft_s) for one, bound in zip(found, bounds, strict=True))


@dataclass(frozen=True, slots=True)
class _Ways:
    """Forecasts by place; ``here`` and ``there`` are the numbers of usable cached tokens."""

    tokens: int
    here: int
    there: int
    at_home: PrefillSite
    away: PrefillSite
    link: RouteLink
    cache: CacheSize

    def local(self) -> Forecast:
        prefill_s = self.at_home.cost.seconds(self.here, self.tokens - self.here)
        queue_s = self.at_home.queue_s
        limit = "queue" if queue_s > prefill_s else "prefill"
        return Forecast(LOCAL, queue_s + prefill_s, limit, queue_s, prefill_s, 0.0)

    def remote(self) -> Forecast:
        prefill_s = self.away.cost.seconds(self.there, self.tokens - self.there)
        ends, first_s, end_s = self._arrivals(self.here)
        limit = max(ends, key=lambda name: ends[name])
        ttft_s = ends[limit] + self.link.rtt_s / 2 + self._step_s
        if limit == "prefill" and self.away.queue_s > prefill_s:
            limit = "queue"
        cache, last = self.cache, self.cache.last_group(self.tokens)
        return Forecast(
            REMOTE,
            ttft_s,
            limit,
            self.away.queue_s,
            prefill_s,
            (self.tokens - self.here) * cache.per_token + cache.constant,
            ready_s=first_s,
            computed_s=end_s,
            last_s=self.link.seconds(last * cache.per_token + cache.constant),
            tail_s=last * cache.decode_s + self.link.rtt_s / 2 + self._step_s,
        )

    def front(self) -> int | None:
        """Return the number of tokens to compute here instead of sending them; None if this does not save time."""
        group = self.cache.group_tokens
        low, high = self.here, self.cache.whole_groups(self.tokens, self.tokens)
        slow_s, least_s = self._sent_s(low), self._sent_s(high)
        if slow_s <= least_s or self._front_s(low + group) >= slow_s:
            return None
        # More local computation ends later, but then the rest arrives sooner. Search for the point where the two meet.
        while high - low > group:
            middle = (low + high) // (2 * group) * group
            sent_s = self._sent_s(middle)
            if sent_s > least_s and self._front_s(middle) <= sent_s:
                low = middle
            else:
                high = middle
        best = min((low, high), key=lambda front: max(self._front_s(front), self._sent_s(front)))
        return best if best > self.here else None

    def both(self, front: int) -> Forecast:
        sent_s, front_s = self._sent_s(front), self._front_s(front)
        found = replace(self, here=front).remote()
        return replace(
            found,
            place=BOTH,
            ttft_s=max(sent_s, front_s) + self._step_s,
            limit=found.limit if sent_s >= front_s else "prefill",
            front_tokens=front,
            front_s=front_s - self.at_home.queue_s,
        )

    def fetch(self) -> Forecast:
        here, there, cache, link = self.here, self.there, self.cache, self.link
        nbytes = (there - here) * cache.per_token + cache.constant
        group, decode_s = cache.group_tokens, (there - here) * cache.decode_s
        carried_s = link.through((link.rtt_s / 2, nbytes)) + group * cache.decode_s
        decoded_s = link.through((link.rtt_s / 2, group * cache.per_token)) + decode_s
        arrived_s = max(carried_s, decoded_s) + link.rtt_s / 2
        prefill_s, queue_s = self.at_home.cost.seconds(there, self.tokens - there), self.at_home.queue_s
        if prefill_s >= max(queue_s, arrived_s):
            limit = "prefill"
        elif queue_s >= arrived_s:
            limit = "queue"
        else:
            limit = "link" if carried_s >= decoded_s else "decode"
        ttft_s = max(queue_s, arrived_s) + prefill_s
        return Forecast(FETCH, ttft_s, limit, queue_s, prefill_s, nbytes)

    @property
    def _step_s(self) -> float:
        return self.at_home.cost.seconds(self.tokens - 1, 1)

    def _front_s(self, front: int) -> float:
        """Return the time at which the first ``front`` tokens have been computed here."""
        return self.at_home.queue_s + self.at_home.cost.seconds(self.here, front - self.here)

    def _sent_s(self, sent: int) -> float:
        """Return the time at which all tokens from ``sent`` on have been sent and decoded."""
        return max(self._arrivals(sent)[0].values()) + self.link.rtt_s / 2

    def _arrivals(self, sent: int) -> tuple[dict[str, float], float, float]:
        """Return each limit on sending the tokens from ``sent`` on, and the times of the first and the last group."""
        tokens, there, link, cache = self.tokens, self.there, self.link, self.cache
        behind = max(sent, there)
        last, fresh = cache.last_group(tokens), min(cache.group_tokens, tokens - behind)
        begin_s = max(link.rtt_s / 2, self.away.queue_s)
        end_s = begin_s + self.away.cost.seconds(there, tokens - there)
        first_s = begin_s + self.away.cost.seconds(there, behind + fresh - there) if link.live else end_s
        known, rest = (behind - sent) * cache.per_token, (tokens - behind) * cache.per_token + cache.constant
        ends = {
            "prefill": link.through((end_s, last * cache.per_token + cache.constant)) + last * cache.decode_s,
            "link": link.through((link.rtt_s / 2, known), (first_s, rest)) + last * cache.decode_s,
            "decode": link.through((first_s, fresh * cache.per_token)) + (tokens - behind) * cache.decode_s,
        }
        if known:  # the remotely cached part is decoded as it arrives
            begun_s = link.through((link.rtt_s / 2, cache.group_tokens * cache.per_token))
            ends["decode"] = max(ends["decode"], begun_s + (tokens - sent) * cache.decode_s)
        return ends, first_s, end_s
