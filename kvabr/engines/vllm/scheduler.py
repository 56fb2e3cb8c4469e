"""The connector's half beside vLLM's scheduler: what is to be had from the origin, and what is worth publishing.

It never waits: a lookup runs on the fetcher's event loop, and until it ends, or its share of the deadline has passed,
the answer is "ask again". A request is answered with a hit once: if its load fails, vLLM asks again, and would for
ever if it got the same answer.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvabr.client.blocking import Handle
from kvabr.client.lookup import Found
from kvabr.engines.layouts import whole_blocks
from kvabr.engines.vllm.config import WHERE, ServedModel, VllmSettings
from kvabr.engines.vllm.meta import Load, Pending, Publication, Step
from kvabr.engines.vllm.node import Node
from kvabr.engines.vllm.stats import ConnectorCounts
from kvabr.types.errors import FormatError, TransportError, UsageError

_log = logging.getLogger("vllm.kvabr")

_LEAST_LEFT = 0.25
"""Share of its deadline that a play is given even if the request waited for longer than that to be scheduled."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
"""After lookups that failed, seconds in which no other is begun: an origin that is gone must not cost every request its
share of the deadline. Doubled with every failure in a row."""
_LONGEST_DEADLINE_S = 60.0
"""Seconds that a request may ask for, unless the user's own are more: its blocks are its own until the play is over."""


@dataclass(slots=True)
class _Asked:
    """A request that vLLM has asked about."""

    tokens: list[int]
    salt: bytes
    deadline_s: float
    asked_s: float
    lookup: Handle[Found | None] | None
    found: Found | None = None
    settled: bool = False
    """The answer is known: `found`, or nothing."""
    begun: bool = False
    """Its load was begun: from now on the answer is nothing."""


class SchedulerHalf:
    """What `connector` passes on from vLLM's scheduler; requests are vLLM's own objects."""

    def __init__(self, settings: VllmSettings, model: ServedModel, node: Node | None, *, produces: bool) -> None:
        """Take part.

        Args:
            settings: the user's.
            model: the engine's.
            node: where lookups are begun; None: nothing is consumed.
            produces: whether what is computed is published.

        Raises:
            UsageError: the salt's file is no secret.
        """
        self._settings, self._model, self._node, self._produces = settings, model, node, produces
        self._salt = settings.salt
        # A rank that finds its heads published by themselves need not fetch those of the others.
        self._specs = (model.spec,) if model.shard is model.spec else (model.shard, model.spec)
        self._asked: dict[str, _Asked] = {}
        self._pending = Pending()
        self._loading: set[str] = set()
        self.counts = ConnectorCounts()
        self._pause_s, self._again_s = 0.0, 0.0
        self._said: set[str] = set()

    # ------------------------------------------------------------------ hits

    def arrived(self, request: Any) -> None:
        """A request has come: its lookup begins while it waits for its turn."""
        if self._node is not None and request.request_id not in self._asked:
            self._asked[request.request_id] = self._ask(request)

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens behind the first ``computed`` can be loaded; see vLLM's ``get_num_new_matched_tokens``."""
        if self._node is None:
            return 0, False
        asked = self._asked.get(request.request_id)
        if asked is None:
            asked = self._asked[request.request_id] = self._ask(request)
        if asked.begun:
            return 0, False
        if not asked.settled and not self._settle(asked):
            return None, False
        if asked.found is None:
            return 0, False
        last = self._last(asked)
        if last - computed <= 0 or computed % self._model.block:
            return 0, False
        return last - computed, True

    def allocated(self, request: Any, blocks: Sequence[int], external: int) -> None:
        """Blocks for the tokens that were promised are there."""
        asked = self._asked.get(request.request_id)
        if asked is None or asked.found is None or external <= 0 or asked.begun:
            return
        size, last = self._model.block, self._last(asked)
        first = last - external
        asked.begun = True
        self._loading.add(request.request_id)
        left_s = asked.deadline_s - (time.monotonic() - asked.asked_s)
        found = _cut(asked.found, last)
        self._pending.loads.append(
            Load(
                request=request.request_id,
                found=found,
                first=first,
                last=last,
                blocks=tuple(blocks[first // size : last // size]),
                behind=len(asked.tokens) - last,
                deadline_s=max(left_s, _LEAST_LEFT * asked.deadline_s),
                tokens=() if self._model.shard is self._model.spec else tuple(asked.tokens[: found.catalog.tokens]),
                salt=asked.salt,
            )
        )
        asked.found, asked.tokens = None, []

    def step(self, scheduled: int) -> Step:
        """What the workers are to hear with the next step, which computes ``scheduled`` tokens."""
        pending, self._pending = self._pending, Pending()
        return Step(tuple(pending.loads), tuple(pending.publications), scheduled)

    def received(self, requests: set[str]) -> None:
        """Loads that are over, one way or the other."""
        self._loading -= requests

    def finished(self, request: Any, blocks: Sequence[int]) -> bool:
        """A request has ended; returns whether its blocks must be kept because they are being published."""
        name = request.request_id
        asked = self._asked.pop(name, None)
        if asked is not None and asked.lookup is not None:
            asked.lookup.cancel()
        # A load that never left for the worker needs no more doing; its blocks are free once vLLM hears of its end.
        if name in self._loading or not self._produces or _params(request).get("publish", True) is False:
            return False
        tokens = min(int(request.num_computed_tokens), int(request.num_prompt_tokens))
        tokens = whole_blocks(tokens, max(self._model.block, self._model.spec.group_tokens))
        if not tokens or self._unfit(request) is not None:
            self.counts.add("publish_skipped_short" if not tokens else "publish_skipped_unfit")
            return False
        self._pending.publications.append(
            Publication(
                request=name,
                tokens=tuple(request.prompt_token_ids[:tokens]),
                blocks=tuple(blocks[: tokens // self._model.block]),
                salt=self._salt_of(request),
            )
        )
        return True

    # -------------------------------------------------------------- internals

    def _ask(self, request: Any) -> _Asked:
        now = time.monotonic()
        asked = _Asked([], b"", self._settings.deadline_s, now, None, settled=True)
        if _params(request).get("play", True) is False:
            return asked
        if (why := self._unfit(request)) is not None:
            self.counts.add("lookups_unfit")
            self._say_once(f"requests with {why} are not played: their caches depend on more than their tokens")
            return asked
        if len(request.prompt_token_ids) <= self._model.spec.group_tokens:
            self.counts.add("lookups_short")
            return asked
        if now < self._again_s:
            self.counts.add("lookups_paused")
            return asked
        assert self._node is not None  # noqa: S101  # nobody asks a producer
        asked.tokens, asked.salt = list(request.prompt_token_ids), self._salt_of(request)
        asked.deadline_s = self._deadline_of(request)
        within_s = self._settings.lookup_share * asked.deadline_s
        asked.lookup = self._node.look_up(asked.tokens, self._specs, asked.salt, within_s)
        asked.settled = False
        return asked

    def _settle(self, asked: _Asked) -> bool:
        """Whether the lookup is over; then its answer is taken."""
        lookup = asked.lookup
        if lookup is None or not lookup.done():
            # The lookup ends by itself; this is for an event loop that does not.
            if lookup is not None and time.monotonic() - asked.asked_s < asked.deadline_s:
                return False
            asked.settled = True
            self.counts.add("lookups_failed")
            return True
        asked.settled, asked.lookup = True, None
        try:
            asked.found = lookup.result()
        except (TransportError, TimeoutError) as error:
            self.counts.add("lookups_failed")
            self._pause(asked, str(error) or "in time")
        except FormatError as error:
            self.counts.add("lookups_refused")
            self._say_once(f"what the origin has is not played: {error}")
        except Exception:  # noqa: BLE001  # whatever it is, the request goes on
            self.counts.add("lookups_failed")
            _log.exception("kvabr: a lookup failed; the request is computed")
        else:
            self._pause_s = self._again_s = 0.0
            self.counts.add("lookups_hit" if asked.found is not None else "lookups_miss")
        return True

    def _pause(self, asked: _Asked, why: str) -> None:
        """Ask the origin nothing for a while. Lookups that were under way together count as one failure."""
        if asked.asked_s < self._again_s - self._pause_s:
            return
        self._pause_s = min(_LONGEST_PAUSE_S, max(_FIRST_PAUSE_S, 2 * self._pause_s))
        self._again_s = time.monotonic() + self._pause_s
        _log.warning(
            "kvabr: no answer from the origin (%s); requests are computed, next lookup in %.1f s", why, self._pause_s
        )

    def _last(self, asked: _Asked) -> int:
        """The token after the last that can be loaded: at least one must be left to compute."""
        if asked.found is None:
            return 0
        return whole_blocks(min(asked.found.catalog.tokens, len(asked.tokens) - 1), self._model.block)

    def _salt_of(self, request: Any) -> bytes:
        """A request's own salt keeps its cache apart from all others', here as in vLLM's own prefix cache."""
        own = getattr(request, "cache_salt", None)
        if not own:
            return self._salt
        return hashlib.sha256(b"kvabr.vllm.salt/1\0" + self._salt + b"\0" + str(own).encode()).digest()

    def _deadline_of(self, request: Any) -> float:
        given = _params(request).get("deadline_s")
        if given is None:
            return self._settings.deadline_s
        most_s = max(_LONGEST_DEADLINE_S, self._settings.deadline_s)
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given <= most_s:
            self._say_once(f"kv_transfer_params: a deadline_s is no number up to {most_s:g}; {WHERE} has the say")
            return self._settings.deadline_s
        return float(given)

    @staticmethod
    def _unfit(request: Any) -> str | None:
        """What, beside its tokens, a request's cache depends on; None: nothing."""
        if getattr(request, "lora_request", None) is not None:
            return "a LoRA adapter"
        if getattr(request, "mm_features", None):
            return "images or sound"
        if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
            return "embeddings instead of tokens"
        return None

    def _say_once(self, what: str) -> None:
        if what not in self._said and len(self._said) < 100:
            self._said.add(what)
            _log.warning("kvabr: %s", what)


def _params(request: Any) -> dict[str, Any]:
    """What a request says for itself: ``deadline_s``, ``play`` (false: compute all), ``publish`` (false: do not)."""
    given = getattr(request, "kv_transfer_params", None)
    return given if isinstance(given, dict) else {}


def _cut(found: Found, tokens: int) -> Found:
    """What was found, as far as it is wanted."""
    catalog = found.catalog
    groups = catalog.spec.groups(tokens)
    if not 0 < groups <= catalog.groups:
        raise UsageError(f"{tokens} tokens of a cache that has {catalog.tokens}")
    return Found(catalog.prefix(groups), found.sha256)
