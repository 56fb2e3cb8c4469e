"""Receives KV events for a short time, to count the tokens of a prompt that each site has cached."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from kvabr.cli.serving import logger
from kvabr.telemetry.kv_events.publisher import EventSockets
from kvabr.telemetry.kv_events.subscriber import KVEventSubscriber
from kvabr.telemetry.kv_events.wire import KVEvent
from kvabr_lab.route import HeldPrefixes, PrefixHolder

_SILENCE_S = 1.0
"""Seconds without events after which a site's report is complete."""


def listen(sites: Mapping[str, EventSockets], tokens: Sequence[int], max_s: float) -> dict[str, int | None]:
    """Return the number of cached tokens of a prompt by site; None for a site without events.

    Wait until all sites have sent events and then none for a while, at most ``max_s`` seconds.
    """
    held, heard, lock = HeldPrefixes(), dict[str, float](), threading.Lock()
    until_s, log = time.monotonic() + max_s, logger()
    with ExitStack() as stack:
        for site, where in sites.items():

            def on_events(topic: str, events: Sequence[KVEvent], site: str = site) -> None:
                with lock:
                    heard[site] = time.monotonic()
                    held.apply(PrefixHolder(site, topic), events)

            def forget(_why: str, site: str = site) -> None:
                with lock:
                    held.forget(site)

            stack.enter_context(KVEventSubscriber(where, on_events, forget, log))
        while (now := time.monotonic()) < until_s:
            with lock:
                if len(heard) == len(sites) and now - max(heard.values()) > _SILENCE_S:
                    break
            time.sleep(min(0.05, until_s - now))
    best = dict.fromkeys(sites, 0)
    for holder, count in held.cached(tokens).items():
        best[holder.publisher] = max(best[holder.publisher], count)
    return {site: best[site] if site in heard else None for site in sites}
