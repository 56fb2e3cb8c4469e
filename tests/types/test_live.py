"""Live catalogs and the news of each group: round trips, bounds, and what does not belong together."""

import json
from dataclasses import replace

import pytest

from kvabr.types.errors import FormatError
from kvabr.types.live import (
    MAX_EDGE_BYTES,
    UNKNOWN,
    GrowingCatalog,
    LiveCatalog,
    LiveEnd,
    PublishedFrames,
    parse_edge,
    parse_edges,
    published_catalog,
)
from tests.catalogs import catalog
from tests.types.test_layer_classes import catalog as hybrid

KEY = "0123456789abcdef"


def live(groups=4):
    offer = catalog(groups, layered=True)
    tracks = tuple(replace(track, digests=(UNKNOWN,) * groups) for track in offer.tracks)
    return LiveCatalog(replace(offer, tracks=tracks), tuple(0.5 * (group + 1) for group in range(groups)), KEY)


def news(group, names, key=KEY, size=1000):
    frames = dict.fromkeys(names, (size + group, f"{group:064x}"))
    return PublishedFrames(key, group, 0.25 * group, frames)


NAMES = tuple(live().catalog.by_name)


def growing_of(groups):
    made = live()
    return GrowingCatalog(made, made.catalog.prefix(groups))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace("kvabr.live/1", "kvabr.live/9"), "schema"),
        (lambda text: text.replace(KEY, "xyz"), "key"),
        (lambda text: text.replace("[0.5,1.0,1.5,2.0]", "[0.5,1.0,1.5]"), "4 groups, got 3"),
        (lambda text: text.replace("[0.5,1.0,1.5,2.0]", "[0.5,1.0,1.5,1.0]"), "ascend"),
        (lambda text: text.replace("[0.5,1.0,1.5,2.0]", "[-1,1.0,1.5,2.0]"), r">= 0.0, at seconds\[0\]"),
        (lambda text: text.replace("[0.5,1.0,1.5,2.0]", "[0.5,1.0,1.5,1e999]"), "live catalog"),
        (lambda text: text.replace("[0.5,1.0,1.5,2.0]", json.dumps([1.0] * 90)), "more times than its 4"),
        (lambda text: text.replace("[0.5,1.0,1.5,2.0]", "5"), "Expected `array`, got `int`, at seconds"),
        (lambda text: text.partition("\n")[2], "catalog: Expected `object`"),
        (lambda text: text.partition("\n")[0], "the second line is missing"),
        (lambda text: text.replace('"key"', '"kez"'), "missing"),
        (lambda _: "[" * 100_000 + "\n{}", "catalog"),
    ],
)
def test_a_live_catalog_that_is_wrong_is_refused(change, says):
    with pytest.raises(FormatError, match=says):
        LiveCatalog.loads(change(live().dumps()).encode())


def test_several_news_lie_one_behind_the_other():
    messages = [news(0, NAMES), news(1, NAMES), LiveEnd(KEY), LiveEnd(KEY, '}{ "')]
    assert [parse_edge(message.dumps()) for message in messages] == messages
    assert parse_edges(b"".join(message.dumps() for message in messages)) == messages
    assert parse_edges(b"") == []
    with pytest.raises(FormatError, match="edge message"):
        parse_edges(messages[0].dumps() + b"}")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"{}", b"null", b'"x"', b"\xff", b"[" * 10_000, b'{"key":1}', b'{"key":"0123456789abcdef"}',
        b'{"key":"0123456789abcdef","end":1}', b'{"key":"0123456789abcdeg","end":""}',
        b'{"key":"0123456789abcdef","group":-1,"ready_s":0,"frames":{}}',
        b'{"key":"0123456789abcdef","group":true,"ready_s":0,"frames":{}}',
        b'{"key":"0123456789abcdef","group":1,"ready_s":1e999,"frames":{}}',
        b'{"key":"0123456789abcdef","group":1,"ready_s":0,"frames":[]}',
        b'{"key":"0123456789abcdef","group":1,"ready_s":0,"rest_s":-1,"frames":{}}',
        b'{"key":"0123456789abcdef","group":1,"ready_s":0,"rest_s":1e999,"frames":{}}',
        b'{"key":"0123456789abcdef","group":1,"ready_s":0,"rest_s":[],"frames":{}}',
        b'{"key":"0123456789abcdef","group":1,"ready_s":0,"frames":{"a":[0,"' + b"0" * 64 + b'"]}}',
        b'{"key":"0123456789abcdef","group":1,"ready_s":0,"frames":{"a":[5,"00"]}}',
        b'{"key":"0123456789abcdef","group":1,"ready_s":0,"frames":{"a":[5]}}',
        b'{"key":"0123456789abcdef","end":"' + b"x" * MAX_EDGE_BYTES + b'"}',
    ],
)  # fmt: skip
def test_news_that_are_wrong_are_refused(data):
    with pytest.raises(FormatError, match="edge message"):
        parse_edge(data)


def test_sizes_and_digests_become_known_group_by_group():
    growing = growing_of(4)
    offer = growing.catalog
    assert (growing.edge, growing.chunks, growing.complete) == (0, 0, False)
    growing.publish(news(0, NAMES))
    growing.publish(news(1, NAMES))
    assert growing.edge == 2
    assert offer.track("base").bytes[:2] == [1000, 1001]
    assert offer.track("base").digests[1] == f"{1:064x}"
    assert offer.track("base").digests[2] == UNKNOWN
    assert offer.by_name["layer-1"].bytes[0] == 1000  # also where it was looked up before
    for group in (2, 3):
        growing.publish(news(group, NAMES))
    assert growing.complete
    shorter = growing_of(2)
    for group in range(4):
        shorter.publish(news(group, NAMES))
    assert shorter.complete
    assert (shorter.edge, shorter.catalog.groups) == (2, 2)


@pytest.mark.parametrize("half", ["\ud800", "a\udc00", "\ud800\ud800"])
def test_halves_of_surrogate_pairs_are_refused(half):
    """Strings that cannot be encoded would raise wherever they are sent."""
    for message in ({"key": KEY, "end": half}, {"key": KEY, "group": 0, "ready_s": 0, "frames": {half: [1, UNKNOWN]}}):
        with pytest.raises(FormatError, match="surrogates not allowed"):
            parse_edge(json.dumps(message).encode())
    with pytest.raises(FormatError):
        LiveCatalog.loads(live().dumps().replace('"test/model"', json.dumps(half)).encode())
    assert (
        parse_edge(LiveEnd(KEY, f"a path with {half}").dumps()).reason
        == f"a path with {half.encode(errors='replace').decode()}"
    )
    assert parse_edge(LiveEnd(KEY, "\U0001f600").dumps()).reason == "\U0001f600"


def test_news_with_digests_of_another_kind_are_refused():
    growing, marked = growing_of(4), dict.fromkeys(NAMES, (1000, "b3-" + "0" * 64))
    message = replace(news(0, NAMES), frames=marked)
    assert parse_edge(message.dumps()) == message
    with pytest.raises(FormatError, match="digests of the kind sha256"):
        growing.publish(message)
    assert growing.edge == 0


BEGUN = [replace(news(0, ["base"]), rest_s=0.5), news(1, ["base"])]


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ([], news(1, NAMES)),  # group 0 is next
        ([], news(0, NAMES, key="f" * 16)),
        ([], news(0, ["layer-1", "layer-2"])),  # no track that stands alone
        ([], news(0, ["unheard-of"])),
        ([], news(0, [*NAMES, "unheard-of"])),
        ([], news(4, NAMES)),
        (BEGUN, news(0, ["base"])),  # it is there
        (BEGUN, news(0, ["layer-1", "unheard-of"])),
        (BEGUN, replace(news(0, []), rest_s=1.0)),
        (BEGUN, news(1, ["layer-1"])),  # nothing more of it was to come
        (BEGUN, news(3, NAMES)),
    ],
)
def test_news_that_do_not_fit_are_refused(before, message):
    growing = growing_of(4)
    for each in before:
        growing.publish(each)
    with pytest.raises(FormatError):
        growing.publish(message)
    assert growing.edge == len(before)


def test_a_frame_that_no_cache_needs_is_refused():
    growing = growing_of(4)
    most = growing.catalog.spec.max_frame_bytes
    with pytest.raises(FormatError, match=f"{most + 1} bytes, more than a cache can need"):
        growing.publish(news(0, NAMES, size=most + 1))
    assert (growing.edge, growing.order.groups) == (0, 0)
    growing.publish(news(0, NAMES, size=most))
    assert growing.edge == 1


def test_what_is_encoded_later_is_added():
    growing = growing_of(2)
    assert growing.publish(replace(news(0, ["base"]), rest_s=0.5)) == []
    assert (growing.edge, growing.coming) == (1, {0: 0.5})
    assert {(0, name) for name in NAMES if name != "base"} == growing.left_out
    assert growing.publish(news(1, NAMES)) == []
    assert growing.complete
    assert not growing.settled
    added = growing.publish(replace(news(0, ["layer-1", "Int4"], size=7), rest_s=0.25))
    assert sorted(added) == [(0, "Int4"), (0, "layer-1")]
    assert growing.coming == {0: 0.25}
    assert growing.catalog.track("layer-1").bytes[:1] == [7]
    assert growing.known["layer-1"][0] == f"{0:064x}"
    assert growing.publish(news(0, ["layer-2"])) == [(0, "layer-2")]
    assert growing.settled
    assert {(0, name) for name in NAMES if name not in {"base", "layer-1", "layer-2", "Int4"}} == growing.left_out


def of_classes():
    """A live catalog of several layer classes, and the news of each of its groups."""
    offer = hybrid()
    told = []
    for chunk in range(len(offer.chunks)):
        units = [unit for unit in offer.units if unit.chunk == chunk]
        names = [offer.spec.parts[unit.part].track_name(track) for unit in units for track in offer.by_name]
        told.append(news(chunk, names, size=5000))
    return LiveCatalog(offer, tuple(map(float, range(len(offer.chunks)))), KEY), told


def test_groups_of_several_classes_appear_together():
    made, told = of_classes()
    offer = made.catalog
    growing = GrowingCatalog(made, offer.to_play)
    wanted = growing.catalog
    assert not wanted.every_token
    for chunk, message in enumerate(told):
        growing.publish(message)
        assert all(wanted.unit(group).chunk <= chunk for group in range(growing.edge))
    assert growing.complete
    assert growing.edge == wanted.groups < offer.groups
    assert min(min(track.bytes) for track in wanted.tracks) >= 5000


def test_what_is_published_is_a_shorter_asset():
    made, told = live(), [news(group, NAMES) for group in range(4)]
    for groups in range(1, 5):
        found = published_catalog(made, told[:groups])
        assert found.chunks == made.catalog.chunks[:groups]
        assert found.namespace.prompt == found.chunks[-1]
        assert found.tokens == 128 * groups
        assert [track.name for track in found.tracks] == list(NAMES)
        for track, offered in zip(found.tracks, made.catalog.tracks, strict=True):
            assert track.bytes == tuple(1000 + group for group in range(groups))
            assert track.digests == tuple(f"{group:064x}" for group in range(groups))
            assert track.loss == offered.loss[:groups]
        assert type(found).loads(found.dumps()) == found
    assert published_catalog(made, []) is None
    assert published_catalog(made, [*told, news(4, NAMES)]) == published_catalog(made, told)


def test_a_track_that_was_left_out_once_is_none_of_the_shorter_asset_nor_is_what_refines_it():
    told = [news(group, NAMES) for group in range(3)]
    told[1] = news(1, [name for name in NAMES if name not in {"layer-1", "FP16"}])
    found = published_catalog(live(), told)
    assert [track.name for track in found.tracks] == [
        name for name in NAMES if name not in {"layer-1", "layer-2", "FP16"}
    ]
    # Where no track goes on, the asset ends before that group.
    told = [news(0, ["FP16"]), news(1, ["FP16"]), news(2, ["Int4"])]
    assert published_catalog(live(), told).tokens == 256


def test_the_shorter_asset_of_several_classes_ends_where_each_can_be_played():
    made, told = of_classes()
    offer = made.catalog
    shorter = [published_catalog(made, told[:groups]) for groups in range(len(told) + 1)]
    # There are snapshots behind the second, the fourth and the last group.
    assert [None if one is None else one.tokens for one in shorter] == [None, None, 32, 32, 64, 70]
    for one in shorter[2:]:
        assert type(one).loads(one.dumps()) == one
        assert len(one.units) == one.groups
        for group, unit in enumerate(one.units):
            assert one.track("finer").bytes[group] == 5000 + unit.chunk
    # As `Catalog.prefix`: what a window loses depends on the distance from the end.
    known = {
        (unit.part, unit.group): loss for unit, loss in zip(shorter[4].units, shorter[4].tracks[0].loss, strict=True)
    }
    prefix = offer.prefix(4)
    for unit, loss in zip(prefix.units, prefix.track("Int8").loss, strict=True):
        assert known[unit.part, unit.group] == loss
