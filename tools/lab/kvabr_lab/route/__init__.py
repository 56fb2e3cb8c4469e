"""Where to prefill: at the decode node's own site, or at another site that sends the cache over the network.

This package can be embedded in a router: it needs neither numpy nor torch, reads no clock and does no I/O. `decide`
places one request, given the state of sites and link; `Router` also learns from requests and transfers.
"""

from kvabr_lab.route.forecast import (
    BOTH,
    FETCH,
    LOCAL,
    PLACES,
    REMOTE,
    CacheSize,
    Forecast,
    Place,
    PrefillSite,
    RouteLink,
    forecasts,
)
from kvabr_lab.route.held import HeldPrefixes, PrefixHolder
from kvabr_lab.route.lengths import break_even_tokens, remote_lengths
from kvabr_lab.route.lookahead import Lookahead
from kvabr_lab.route.router import PROBE_BYTES, PROBE_S, PROBE_WAIT_S, LinkMemory, Router, RouteRequest
from kvabr_lab.route.rule import Route, decide

__all__ = [
    "BOTH",
    "FETCH",
    "LOCAL",
    "PLACES",
    "PROBE_BYTES",
    "PROBE_S",
    "PROBE_WAIT_S",
    "REMOTE",
    "CacheSize",
    "Forecast",
    "HeldPrefixes",
    "LinkMemory",
    "Lookahead",
    "Place",
    "PrefillSite",
    "PrefixHolder",
    "Route",
    "RouteLink",
    "RouteRequest",
    "Router",
    "break_even_tokens",
    "decide",
    "forecasts",
    "remote_lengths",
]
