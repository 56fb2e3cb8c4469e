"""Arguments of wrong types raise kvabr's own errors, from every public call, and never those of its insides."""

from __future__ import annotations

import inspect
import math
import re
from concurrent.futures import Future
from dataclasses import fields, is_dataclass
from functools import partial

import pytest
import torch

import kvabr
from kvabr.blend import Selection, choose
from kvabr.engines.transformers.model_loader import load_model
from kvabr.publish.encoder import publish
from kvabr.publish.live_publisher import LivePublisher
from kvabr.publish.passage_publisher import publish_passage
from kvabr.publish.publisher import Publisher
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.asset_folder import FolderAsset, FolderAssetStore
from kvabr.store.locations import open_asset, open_catalog, open_groups, open_store
from kvabr.telemetry import Telemetry
from kvabr.types.errors import KvabrError
from kvabr_lab.live.origin import LiveOrigin
from kvabr_lab.route import (
    CacheSize,
    PrefillSite,
    RouteLink,
    Router,
    RouteRequest,
    break_even_tokens,
    decide,
    remote_lengths,
)
from tests.client.playing import connection
from tests.toymodel import SPEC, ToyModel, prompt, toy_asset

WRONG = (
    None, 5, -1, 1 << 2000, math.nan, math.inf, True, 1j, "x", "", "\0", b"x", [], ["x"], [None], [-1], (), {},
    {"tokens": [1]}, object(), int, lambda: None, torch.zeros(2, 2), torch.zeros(3), range(0),
)  # fmt: skip
COST = kvabr.PrefillCost(0.001, 0.001)
TOKENS = prompt(70).tokens
SITE, LINK, SIZE = PrefillSite(COST), RouteLink(1e6), CacheSize(1000.0)
REQUEST = RouteRequest(1000)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A store with an asset."""
    folder = tmp_path_factory.mktemp("assets")
    toy_asset(folder / "one")
    return PublishedAssets(folder)


def calls(library, folder):
    """Return each public call with arguments that are right, on an event loop."""
    catalog = library.assets[0].catalog
    link = connection(library)
    client, name = kvabr.AsyncClient(link), f"{SPEC.model}/{catalog.namespace.prompt}"
    found = kvabr.Found(catalog, "0" * 64, catalog.groups)
    publisher = Publisher(folder / "published", SPEC, prior=catalog, tracks=["FP16"])
    router = Router(COST, COST, SIZE, rtt_s=0.1)
    return {
        "AsyncClient": (kvabr.AsyncClient, {"origin": link, **_defaults(kvabr.AsyncClient)}),
        "Client": (_client, {"origin": link, **_defaults(kvabr.AsyncClient)}),
        "peer": (client.peer, {"url": "moqt://127.0.0.1:1/", **_defaults(client.peer)}),
        "connect": (client.connect, {"peer": link}),
        "measure_prefill": (client.measure_prefill, {"engine": ToyModel(), "tokens": TOKENS}),
        "play": (client.play, {"tokens": TOKENS, "deadline": 2.0, **_defaults(client.play, "tokens")}),
        "play_asset": (client.play_asset, {"asset": name, "deadline": 2.0, **_defaults(client.play_asset)}),
        "play_prefix": (
            client.play_prefix, {"found": found, "deadline": 2.0, "cost": COST, **_defaults(client.play_prefix)}
        ),
        "play_coded": (client.play_coded, {"found": found, "deadline": 2.0, **_defaults(client.play_coded)}),
        "find": (client.find, {"tokens": TOKENS, **_defaults(client.find)}),
        "find_asset": (client.find_asset, {"asset": name, **_defaults(client.find_asset)}),
        "fetch_profile": (client.fetch_profile, {"catalog": catalog, **_defaults(client.fetch_profile)}),
        "models": (client.models, _defaults(client.models)),
        "Handle.result": (kvabr.Handle(_over()).result, {"timeout_s": 1.0}),
        "Handle.when_done": (kvabr.Handle(_over()).when_done, {"call": lambda _: None}),
        "PlayOptions": (kvabr.PlayOptions, _fields(kvabr.PlayOptions())),
        "Limits": (kvabr.Limits, _fields(kvabr.Limits())),
        "Exact": (kvabr.Exact, {"ids": (1, 2)}),
        "Passage": (kvabr.Passage, {"ids": (1, 2)}),
        "PrefillCost": (kvabr.PrefillCost, _fields(COST)),
        "PrefillCost.from_rate": (kvabr.PrefillCost.from_rate, {"tokens_per_second": 10.0}),
        "PrefillCost.fit": (kvabr.PrefillCost.fit, {"timings": [(0, 10, 1.0), (0, 20, 2.0), (5, 10, 1.0)]}),
        "TrackNamespace": (kvabr.TrackNamespace, {"model": "m", "prompt": "0" * 64}),
        "KVSpec.uniform": (kvabr.KVSpec.uniform, _uniform()),
        "save": (kvabr.save, {"played": None, "path": str(folder / "saved")}),
        "decide": (
            decide, {"tokens": 100, "local": SITE, "remote": SITE, "link": LINK, "cache": SIZE, **_defaults(decide)}
        ),
        "PrefillSite": (PrefillSite, _fields(SITE)),
        "RouteLink": (RouteLink, _fields(LINK)),
        "CacheSize": (CacheSize, _fields(SIZE)),
        "CacheSize.of_catalog": (CacheSize.of_catalog, {"catalog": catalog, "most_loss": 1.0, "decoders": 1}),
        "RouteRequest": (RouteRequest, _fields(REQUEST)),
        "Router": (Router, {"local": COST, "remote": COST, "cache": SIZE, "rtt_s": 0.1, **_defaults(Router)}),
        "Router.route": (router.route, {"request": REQUEST, "now": 0.0}),
        "Router.probe": (router.probe, {"now": 0.0}),
        "Router.arrived": (router.arrived, {"nbytes": 1.0, "seconds": 1.0, "now": 0.0}),
        "remote_lengths": (remote_lengths, {"local": SITE, "remote": SITE, "link": LINK, "cache": SIZE}),
        "break_even_tokens": (break_even_tokens, {"local": SITE, "remote": SITE, "link": LINK, "cache": SIZE}),
        "choose": (choose, {"prompt": Selection(4, ((0, 4),), 1), "scores": torch.zeros(4), "share": 0.5}),
        "open_store": (open_store, {"location": library.assets[0].path.parent, **_defaults(open_store)}),
        "open_asset": (open_asset, {"location": library.assets[0].path}),
        "open_catalog": (open_catalog, {"location": library.assets[0].path}),
        "open_groups": (open_groups, {"location": str(folder / "groups"), "max_bytes": 1000, **_defaults(open_groups)}),
        "FolderAsset.open": (FolderAsset.open, {"path": library.assets[0].path, **_defaults(FolderAsset.open)}),
        "FolderAssetStore": (FolderAssetStore, {"root": library.assets[0].path.parent}),
        "Publisher": (
            partial(_closed, Publisher),
            {"location": folder / "p", "spec": SPEC, "prior": catalog, **_defaults(Publisher)},
        ),
        "Publisher.reserve": (publisher.reserve, {"tokens": TOKENS, "salt": b""}),
        "LivePublisher": (LivePublisher, {"publisher": publisher, **_defaults(LivePublisher)}),
        "LivePublisher.begin": (
            LivePublisher(publisher).begin, {"tokens": TOKENS, "pace": COST, **_defaults(LivePublisher.begin)}
        ),
        "publish_passage": (publish_passage, {**_needed(publish_passage), "publisher": publisher}),
        "publish": (publish, {**_needed(publish), "engine": ToyModel(), "prompt": prompt(70)}),
        "load_model": (load_model, {"model": str(folder / "none"), **_defaults(load_model)}),
        "LiveOrigin": (LiveOrigin, {"asset": "none", "backend": "auto", "follow": False}),
        "Telemetry": (Telemetry, _defaults(Telemetry)),
    }  # fmt: skip


def _closed(kind, **arguments):
    made = kind(**arguments)
    made.close()


def _over():
    future = Future()
    future.set_result(None)
    return future


def _client(**arguments):
    kvabr.Client(**arguments).close()


def _defaults(call, *but):
    parameters = inspect.signature(call).parameters.values()
    return {
        each.name: each.default
        for each in parameters
        if each.default is not each.empty and each.name not in but and each.name != "origin"
    }


def _needed(call):
    """Arguments without a default, all wrong: nothing may come of the call."""
    return {name: each.default for name, each in inspect.signature(call).parameters.items()}


def _fields(value):
    assert is_dataclass(value)
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _uniform():
    shape = {"layers": 2, "kv_heads": 2, "head_dim": 4, "dtype": "float16"}
    return {"model": "m", "tokenizer": "t", **shape, **_defaults(kvabr.KVSpec.uniform)}


NAMES = (
    "Handle.result", "Handle.when_done",
    "AsyncClient", "Client", "peer", "connect", "measure_prefill", "play", "play_asset", "play_prefix", "play_coded",
    "find", "find_asset", "fetch_profile", "models", "PlayOptions", "Limits", "Exact", "Passage", "PrefillCost",
    "PrefillCost.from_rate", "PrefillCost.fit", "TrackNamespace", "KVSpec.uniform", "save", "decide", "PrefillSite",
    "RouteLink", "CacheSize", "CacheSize.of_catalog", "RouteRequest", "Router", "Router.route", "Router.probe",
    "Router.arrived", "remote_lengths", "break_even_tokens", "choose", "open_store", "open_asset", "open_catalog",
    "open_groups", "FolderAsset.open", "FolderAssetStore", "Publisher", "Publisher.reserve", "LivePublisher",
    "LivePublisher.begin", "publish_passage", "publish", "load_model", "LiveOrigin", "Telemetry",
)  # fmt: skip


async def called(call, arguments):
    """Call; return what it raised, if that is none of kvabr's errors with something to say."""
    try:
        result = call(**arguments)
        if inspect.isawaitable(result):
            await result
    except Exception as error:  # noqa: BLE001 - this is what is looked for
        return None if isinstance(error, KvabrError) and str(error) else error
    return None


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", NAMES)
async def test_every_argument_of_every_public_call(library, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # "x" may be a path
    call, right = calls(library, tmp_path)[name]
    found = []
    for argument in right:
        for wrong in WRONG:
            raised = await called(call, right | {argument: wrong})
            if raised is not None:
                found.append(f"{name}({argument}={wrong!r}): {raised!r}"[:200])
    assert not found, "\n".join(found)


def test_what_is_wrong_is_named():
    for wrong, said in (
        ({"options": 5}, "AsyncClient: options is 5, of the type int; it must be a PlayOptions or None"),
        ({"timeout_s": math.nan}, "AsyncClient: timeout_s is nan; it must be a number"),
        ({"quic": "udp"}, "AsyncClient: quic is 'udp', of the type str; it must be 'auto' or 'aioquic' or 'qh3'"),
    ):
        with pytest.raises(kvabr.UsageError, match=re.escape(said)):
            kvabr.AsyncClient("moqt://127.0.0.1/", **wrong)
    with pytest.raises(kvabr.UsageError, match=r"Limits: plays is .all., of the type str; it must be a whole"):
        kvabr.Limits(plays="all")
    with kvabr.Client("moqt://127.0.0.1:1/") as client, pytest.raises(kvabr.UsageError, match="work is 5, of"):
        client.begin(5)
