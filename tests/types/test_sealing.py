"""Key rings, what they seal, and catalogs of sealed assets."""

from __future__ import annotations

import base64
import json
import pickle
from dataclasses import replace

import pytest

from kvabr.types.catalog import Catalog, Mix, Quality, groups_of
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import FormatError, SealedError, UsageError, VersionError
from kvabr.types.sealing import KeyFile, KeyRing, Seal, boxed, new_key
from tests.catalogs import catalog

OURS, TENANT, OTHER = (new_key(name) for name in ("ours", "tenant", "other"))
RING, READER, STRANGER = KeyRing((OURS, TENANT)), KeyRing((OTHER, TENANT)), KeyRing((OTHER,))


def whole():
    """Return a catalog that has all that is sealed."""
    made = catalog(3)
    quality = Quality(0.1, 0.01, 0.9, 0.2, 0.15)
    tracks = tuple(replace(track, measured=quality) for track in made.tracks)
    facts = {
        "source": "a secret",
        "prefill": PrefillCost(0.1, 0.001),
        "loss_method": "measured",
        "asked": (0.2, 0.3, 0.5),
    }
    return replace(made, tracks=tracks, mixes=(Mix(("FP16",), 0.1, 0.2),), **facts)


def sealed(ring=RING):
    """Return it as it is published, and as a reader gets it."""
    made = whole()
    return replace(made, key=ring.asset_key(made.chunks[0])), Catalog.loads(
        replace(made, key=ring.asset_key(made.chunks[0])).dumps()
    )


def test_what_is_sealed_is_opened_by_any_key_of_the_ring():
    key = RING.asset_key("a" * 64)
    for ring in (RING, READER, KeyRing((OURS,))):
        assert bytes(ring.unwrap(key.wraps).open(key.seal(b"group", b"bound"), b"bound")) == b"group"
    with pytest.raises(SealedError, match=rf"{OURS.id}, {TENANT.id}.*{OTHER.id} \(other\)"):
        STRANGER.unwrap(key.wraps)
    forged = (replace(key.wraps[1], wrapped="00" * 40),)
    with pytest.raises(SealedError, match="damaged where it is wrapped for tenant"):
        READER.unwrap(forged)


def test_equal_beginnings_are_sealed_alike_and_other_ones_are_not():
    one, same, other = RING.asset_key("a" * 64), RING.asset_key("a" * 64), RING.asset_key("b" * 64)
    assert one.seal(b"group", b"x") == same.seal(b"group", b"x")
    assert (
        len({one.seal(b"group", b"x"), one.seal(b"group", b"y"), one.seal(b"Group", b"x"), other.seal(b"group", b"x")})
        == 4
    )
    assert READER.asset_key("a" * 64).secret != one.secret
    assert RING.asset_key("a" * 64, "a profile").secret != one.secret


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1], lambda data: data[:5], lambda _: b"", lambda data: data[::-1]]
)
def test_what_was_changed_is_not_opened(change):
    key = RING.asset_key("a" * 64)
    data = key.seal(b"a group", b"bound")
    with pytest.raises(SealedError):
        key.open(change(data), b"bound")
    with pytest.raises(SealedError):
        key.open(data, b"elsewhere")


def test_a_catalog_shows_stores_no_losses_and_readers_everything():
    published, locked = sealed()
    assert locked.schema == "kvabr.catalog/4"
    assert locked.key is None
    text = published.dumps()
    assert "a secret" not in text
    assert all(track["loss"] == [0.0] * 3 and track["measured"] is None for track in json.loads(text)["tracks"])
    assert [track.bytes for track in locked.tracks] == [track.bytes for track in published.tracks]
    assert locked.opened(READER) == published
    assert locked.opened(READER).dumps() == text
    assert Catalog.loads(locked.dumps()) == locked  # as a relay passes it on
    assert whole().opened(None) == whole()
    older = Catalog.loads(replace(locked, seal=Seal(locked.seal.wraps, locked.seal.box)).dumps())
    assert older.opened(READER) == published
    assert older.seal.made_by == OURS.id
    for keys in (None, STRANGER):
        with pytest.raises(SealedError, match=OURS.id):
            locked.opened(keys)
    assert OURS.secret.hex() not in repr(locked.opened(READER))
    assert pickle.loads(pickle.dumps(locked.opened(READER))).key == published.key  # noqa: S301  # to another process


def test_a_store_cannot_change_a_sealed_catalog():
    _, locked = sealed()
    longer = replace(locked.tracks[0], bytes=(7, *locked.tracks[0].bytes[1:]))
    changes = (
        {"tracks": (longer, *locked.tracks[1:])},
        {"profile": "ab" * 32},  # its means would make other numbers of the frames
        {"profile_bytes": locked.profile_bytes + 1},
        {"estimated": not locked.estimated},
    )
    for change in changes:
        with pytest.raises(SealedError, match="changed since"):
            replace(locked, **change).opened(READER)


@pytest.mark.parametrize(
    ("hidden", "error"),
    [
        (b"no JSON", "not JSON"),
        (b'{"tracks": []}', "other tracks"),
        (b'{"tracks": [{}, {}, {}, {}, {}, {}, {}], "source": 1}', "source"),
        (b'{"tracks": [{"loss": [1]}, {}, {}, {}, {}, {}, {}]}', "must list"),
        (b'{"tracks": [{"bytes": [1]}, {}, {}, {}, {}, {}, {}], "namespace": {}}', None),
    ],
)
def test_what_a_publisher_sealed_is_checked_like_an_open_catalog(hidden, error):
    import zlib

    made = catalog(3)
    key = RING.asset_key(made.chunks[0])
    locked = Catalog.loads(replace(made, key=key).dumps())
    box = base64.b64encode(key.seal(zlib.compress(hidden), locked._bound)).decode()
    bad = replace(locked, seal=replace(locked.seal, box=box))
    if error is None:  # nothing but what is sealed is taken from it
        assert bad.opened(RING).tracks[0].bytes == made.tracks[0].bytes
        return
    with pytest.raises(FormatError, match=error):
        bad.opened(RING)


def test_boxes_that_no_publisher_makes():
    _, locked = sealed()
    for box in (
        "?",
        "AAAA",
        base64.b64encode(RING.asset_key(locked.chunks[0]).seal(b"no zlib", locked._bound)).decode(),
    ):
        with pytest.raises(FormatError):
            replace(locked, seal=replace(locked.seal, box=box)).opened(RING)
    text = json.loads(locked.dumps())
    for schema in ("kvabr.catalog/1", "kvabr.catalog/5"):
        with pytest.raises(FormatError if schema.endswith("1") else VersionError):
            Catalog.loads(json.dumps({**text, "schema": schema}))


def spans(made, keys=RING):
    """Return a sealed catalog as it is put together from the spans of a bucket."""
    locked = Catalog.loads(replace(made, key=keys.asset_key(made.chunks[0])).dumps())
    return replace(locked, seal=replace(locked.seal, box=""))


def test_runs_tell_what_a_part_of_an_asset_loses():
    made = catalog(40)
    found = spans(made)
    assert len(found.seal.runs) == 3
    assert found.seal.maker == OURS.id
    opened = found.opened(READER)
    assert [track.loss for track in opened.tracks] == [track.loss for track in made.tracks]
    assert (opened.source, opened.prefill) == ("", None)
    whole = tuple(range(40))
    for groups, runs in ((32, 2), (20, 2), (1, 1)):
        part = replace(
            found,
            tokens=groups * made.spec.group_tokens,
            chunks=found.chunks[:groups],
            tracks=tuple(groups_of(track, whole[:groups], whole[:groups]) for track in found.tracks),
            seal=replace(found.seal, runs=found.seal.runs[:runs]),
        )
        assert [track.loss for track in part.opened(READER).tracks] == [track.loss[:groups] for track in made.tracks]


def test_runs_of_another_place_or_asset_are_refused():
    found, other = spans(catalog(40)), spans(catalog(40), KeyRing((OTHER, TENANT)))
    one, two, three = found.seal.runs
    for runs in ((two, one, three), (one, two), (), (one, two, two), (one, two, other.seal.runs[2]), (one, two, "?")):
        with pytest.raises(FormatError):
            replace(found, seal=replace(found.seal, runs=runs)).opened(READER)
    for change in ({"profile": "ab" * 32}, {"position": 16}):
        with pytest.raises(SealedError, match="changed since"):
            replace(found, **change).opened(READER)
    key, runs = RING.asset_key(found.chunks[0]), found._runs
    empty = json.dumps({"tracks": [{"loss": {}}] * len(found.tracks)})
    for text in ("no JSON", '{"tracks": []}', empty):
        with pytest.raises(FormatError):
            replace(found, seal=replace(found.seal, runs=(boxed(key, text, runs._bound(0)), two, three))).opened(READER)


def test_a_ring_that_others_may_read_is_warned_of_once(tmp_path, caplog):
    path = tmp_path / "ring"
    path.write_text(OURS.line())
    for mode, warnings in ((0o600, 0), (0o640, 1), (0o644, 1)):
        path.chmod(mode)
        KeyRing.read(path)
        assert caplog.text.count(f"chmod go= {path}") == warnings


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "without a key"),
        ("# a note\n\n", "without a key"),
        ("a\n", ":1: not a name"),
        (f"ok {base64.b64encode(bytes(32)).decode()}\na/b {base64.b64encode(bytes(32)).decode()}", ":2: not a name"),
        ("a " + base64.b64encode(bytes(31)).decode(), "32 bytes"),
        ("a \xff\xfe", ":1: not a name"),
        ("\n".join(new_key(f"k{number}").line() for number in range(65)), "at most 64"),
        ("x" * (65 << 10), "is this a key ring"),
    ],
)
def test_files_that_are_no_key_rings(tmp_path, text, error):
    (tmp_path / "ring").write_text(text)
    with pytest.raises(UsageError, match=error):
        KeyRing.read(tmp_path / "ring")


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "missing", tmp_path, "\0"):
        with pytest.raises(UsageError, match="cannot read"):
            KeyFile(path)
    with pytest.raises(UsageError, match="letters"):
        new_key("a b")


def test_a_key_file_is_read_again_and_a_bad_one_changes_nothing(tmp_path, caplog):
    path = tmp_path / "ring"
    path.write_text(OURS.line() + "\n")
    file = KeyFile(path)
    assert file.ring == KeyRing((OURS,))
    path.write_text(f"# rotated\n{TENANT.line()}\n{OURS.line()}\n")
    assert file.ring == KeyRing((TENANT, OURS))
    path.write_text("nothing")
    assert file.ring == KeyRing((TENANT, OURS))
    path.unlink()
    assert file.ring == KeyRing((TENANT, OURS))
    assert "stay in use" in caplog.text
