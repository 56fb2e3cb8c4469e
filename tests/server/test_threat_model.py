"""The table of sizes and budgets in the threat model: every row is here, and its figures are those of the code."""

from inspect import signature
from pathlib import Path

import pytest

from kvabr.client import live_feed, lookup
from kvabr.client.options import Limits
from kvabr.codec import profile
from kvabr.link.moqt import connection, endpoint
from kvabr.link.quic import backend
from kvabr.link.tcp import transport as tcp
from kvabr.moqt import messages, requester, session, wire
from kvabr.qmux import frames
from kvabr.server import (
    announced_rates,
    budgets,
    grants,
    live_assets,
    live_tracks,
    published_assets,
    relay,
    relay_catalogs,
    relay_groups,
    relay_live,
    subscriptions,
)
from kvabr.server import server as servers
from kvabr.server.limits import ServerLimits
from kvabr.server.relay_catalogs import Catalogs
from kvabr.store import asset, asset_index, asset_store, cloud, group_cache, names, pages, prompt, store_tree
from kvabr.store import live as store_live
from kvabr.telemetry import prometheus
from kvabr.telemetry.kv_events import feed, publisher, subscriber
from kvabr.telemetry.kv_events import wire as events
from kvabr.telemetry.kv_events.buffer import ReplayBuffer
from kvabr.types import catalog, kv, live, naming, peer, records
from kvabr_lab.route import HeldPrefixes

_UNITS = ("bytes", "KiB", "MiB", "GiB")
DEFAULTS = ServerLimits()
REPLAYS, HELD = (signature(kind).parameters for kind in (ReplayBuffer, HeldPrefixes))
CLIENT = Limits()


def size(count):
    """Bytes as the table writes them: "64 KiB"."""
    unit = 0
    while count % 1024 == 0 and count and unit < len(_UNITS) - 1:
        count, unit = count // 1024, unit + 1
    return f"{count:,} {_UNITS[unit]}"


def sizes(*counts):
    """Several of one unit: "64, 128 MiB"."""
    parts = [size(count).split() for count in counts]
    assert len({unit for _, unit in parts}) == 1
    return f"{', '.join(number for number, _ in parts)} {parts[0][1]}"


def share(part):
    return f"1/{1 / part:g}"


ROWS = {
    "`connections`": [f"{DEFAULTS.connections}", f"up to {servers._HALF_OPEN} more"],
    "`connections-per-address`": [f"{DEFAULTS.connections_per_address}"],
    "`handshake-s`, `idle-s`": [f"{DEFAULTS.handshake_s:g}, {DEFAULTS.idle_s:g} s"],
    "handshakes before addresses": [f"{servers._HALF_OPEN}"],
    "`requests-per-connection`, `requests`": [f"{DEFAULTS.requests_per_connection:,}, {DEFAULTS.requests:,}"],
    "open streams of a peer": [f"{tcp.STREAMS}, 100 with qh3"],  # see `test_streams`
    "over TCP": [size(frames.MAX_FRAME_BYTES), f"{tcp.RECORD_BYTES:,} bytes"],
    "origin: live assets": [f"{live_assets.MAX_LIVE}; {live_assets.MAX_LIVE}, for {live_assets.LINGER_S:g} s"],
    "origin: messages of a live asset": [size(live_tracks.MAX_NEWS_BYTES), f"{live_assets.STALLED_S:g} s"],
    "origin: reads of a live asset's messages": [
        f"{store_live.BATCH_MESSAGES}, or until {size(store_live.BATCH_BYTES)} are exceeded",
        f"{live_assets.POLL_S * 1000:g} ms",
    ],
    "groups sent at a time": [f"{subscriptions.MAX_STREAMS}"],
    "streams before the answer": [sizes(requester.MAX_EARLY_OBJECTS_BYTES), sizes(requester.MAX_PARTIAL_BYTES)],
    "`requests-per-s`": [f"{DEFAULTS.requests_per_s:,.0f}"],
    "`memory-per-connection`": [
        sizes(DEFAULTS.memory_per_connection, DEFAULTS.memory_per_address, DEFAULTS.memory),
        f"after {budgets.OPEN_S:g} s",
    ],
    "`in-flight-per-connection`": [
        sizes(DEFAULTS.in_flight_per_connection, DEFAULTS.in_flight_per_address, DEFAULTS.in_flight),
        f"at least {size(budgets.MIN_IN_FLIGHT_BYTES)}",
    ],
    "unread data of a connection": [
        size(backend.REQUESTS_CONNECTION_WINDOW), f"{size(backend.REQUESTS_STREAM_WINDOW)} a stream",
    ],
    "unread answers": [size(endpoint.Endpoint.most_unread)],
    "own streams": [f"{endpoint._MAX_HELD:,}"],
    "a message, an object's header": [size(messages.MAX_MESSAGE_BYTES + 1), f"{wire.MAX_NAME_BYTES:,} bytes"],
    "bytes before SETUP": [size(session._MAX_EARLY_BYTES), size(session._MAX_PARTIAL_BYTES)],
    "digests in the name of a lookup": [f"{naming.MAX_PREFIX_DIGESTS}"],
    "file of grants": [
        size(grants._MAX_FILE_BYTES), f"{grants._MAX_GRANTS:,} grants",
        f"{grants._MAX_PATTERNS:,} patterns of {grants._MAX_PATTERN:,} characters",
    ],
    "a token": [f"{peer.MAX_TOKEN_BYTES:,} bytes"],
    "relay: catalogs and lookups": [
        f"{share(relay._CATALOGS_SHARE)} of `--memory`, at least {size(relay_catalogs.MIN_BYTES)}",
    ],
    "relay: groups kept": [size(relay.MEMORY_BYTES)],
    "relay: live assets": [f"{relay_live.MAX_LIVE}; after {relay_live.IDLE_S:g} s"],
    "relay: unpublished groups": [
        f"{relay_live._AHEAD_GROUPS}; {relay_groups.MAX_EXPECTED}, {size(relay_groups.MAX_EXPECTED_BYTES)}",
    ],
    "relay: age of a catalog": [f"{Catalogs.FRESH_S:g} to {relay_catalogs.MAX_FRESH_S:g} s"],
    "relay: concurrent lookups": [f"{relay_catalogs._MAX_REQUESTS:,}"],
    "relay: wait for a group": [f"{relay_groups.PATIENCE_S:g} s"],
    "relay: missing names": ["not stored"],
    "origin: catalogs and profiles": [size(published_assets.MAX_CACHED_BYTES)],
    "origin: stores below": [f"{store_tree.MAX_DEPTH} deep; {store_tree.MAX_FOLDERS:,}"],
    "origin: frames read at once": [size(asset.LOADED_BYTES)],
    "catalog for a prompt": [
        size(lookup._HEAD_BYTES), f"{(lookup.MAX_TRACKS + 1) * lookup._ENTRY_BYTES:,} bytes x groups",
        f"counted as {lookup._MIN_GROUPS:,} at least",
    ],
    "every catalog": [size(catalog.MAX_CATALOG_BYTES), f"{catalog.MAX_TRACKS} tracks", "2^20 groups"],
    "of a catalog": [
        f"{records._BASE_VALUES:,} and 1 per {records._VALUE_BYTES} bytes", f"{records.MAX_OBJECTS:,}",
        size(records.MAX_SKIPPED_BYTES),
    ],
    "list of models": [size(kv.MAX_MODELS_BYTES), "4,096 models"],
    "codec profile": [size(catalog.MAX_PROFILE_BYTES), f"its header {size(profile._MAX_HEADER_BYTES)}"],
    "announced rates": [f"{announced_rates._MAX_BLOCKS:,}; {announced_rates._MAX_SITES}; a day"],
    "announced rate, from a server": [f"10^{len(str(naming.MAX_RATE_KBPS * 1000)) - 1} bit/s"],
    "token ids of a prompt": [size(prompt.MAX_PROMPT_BYTES)],
    "KV events: batches stored": [
        f"{REPLAYS['max_batches'].default:,}, {size(REPLAYS['max_bytes'].default)}; {publisher._MAX_WAITING:,}",
        f"{size(publisher._MAX_REQUEST_BYTES)}; {1 / publisher._REPLAY_EVERY_S:g} a second",
    ],
    "KV events received": [
        f"{size(events.MAX_MESSAGE_BYTES)}; {feed.MAX_WAITING:,}, {size(feed.MAX_WAITING_BYTES)}",
        f"{subscriber.REPLAY_S:g} s; 2^{HELD['max_blocks'].default.bit_length() - 1}",
    ],
    "store: models": [f"{names.MAX_MODELS}"],
    "store: page": [size(pages.MAX_PAGE_BYTES), size(pages._MAX_JSON_BYTES), f"{names.PAGE_GROUPS} groups"],
    "store: a frame": [size(kv.MAX_FRAME_BYTES), f"{size(names.PACK_BYTES)}, {names.PAGE_GROUPS} groups"],
    "live catalog": [size(live.MAX_LIVE_BYTES), size(live.MAX_EDGE_BYTES)],
    "store: assets per server": [f"{asset_store.MAX_LISTED:,}"],
    "store: pause between checks": [f"{asset_index.MAX_PAUSE_S:g} s; {asset_index.RECHECK_S:g} s"],
    "object store: tries of a request": [f"{cloud._TRIES}, {cloud.WAIT_S} s"],
    "object store: groups of relays and clients": [
        f"{size(group_cache._MAX_GROUP_BYTES)} each; read {group_cache._READ_S:g} s",
        f"written {group_cache._WRITE_S:g} s",
        f"left alone for {group_cache._PAUSE_S:g} s",
    ],
    "group, from its catalog or news": [
        f"{kv._MAX_TIMES_FP16} x FP16 + {size(kv._SLACK_BYTES)}, at most {size(kv.MAX_FRAME_BYTES)}",
    ],
    "client: unread data": [size(backend.CONNECTION_WINDOW), f"{size(backend.STREAM_WINDOW)} a stream"],
    "client: requests in flight": [f"{connection.MAX_IN_FLIGHT}"],
    "client: base of a group": [
        f"{live_feed._TIMES_EXPECTED} x expected + {size(live_feed._SLACK_BYTES)}",
        f"{live_feed._MAX_AHEAD} groups of a play",
    ],
    "client: plays": [f"{CLIENT.plays}, {CLIENT.waiting}"],
    "client: groups kept": [sizes(CLIENT.memory_bytes, CLIENT.disk_bytes)],
    "metrics: names of tracks": [f"{prometheus.MAX_LABEL_VALUES}"],
    "metrics: connections": [f"{prometheus._MAX_CONNECTIONS}"],
}  # fmt: skip


def table():
    text = (Path(__file__).parents[2] / "docs" / "design" / "threat-model.md").read_text()
    lines = [line for line in text.partition("## Sizes and budgets")[2].splitlines() if line.startswith("|")]
    return [line.strip("| ") for line in lines[2:]]


def test_every_row_is_here_and_every_row_of_here_is_there():
    rows = table()
    for name in ROWS:
        assert sum(row.startswith(name) for row in rows) == 1, name
    for row in rows:
        assert sum(row.startswith(name) for name in ROWS) == 1, row
    assert catalog.MAX_GROUPS == 1 << 20


@pytest.mark.parametrize("name", ROWS)
def test_figures(name):
    (row,) = [row for row in table() if row.startswith(name)]
    for figure in ROWS[name]:
        assert figure in row


def test_every_limit_is_listed():
    rows = " ".join(table())
    assert all(f"`{name.replace('_', '-')}`" in rows for name in ServerLimits.__slots__)
