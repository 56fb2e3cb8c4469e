"""Encryption at rest: what is not exactly what was written under a name and a key fails, and costs little."""

import os
import random

import pytest

from kvabr import Client
from kvabr.store.asset import is_damage
from kvabr.store.encrypted import SEGMENT_BYTES, EncryptedStore, WrongKeyError, read_key
from kvabr.store.local import LocalStore
from kvabr.store.locations import KEY_FILE, PREVIOUS_KEY_FILE, open_objects, open_store
from kvabr.store.memory import MemoryStore
from kvabr.store.store import listing
from kvabr.types.errors import AssetError, KvabrError, UsageError
from tests.store.publishing import PLAIN, check, put

SIZES = (0, 1, SEGMENT_BYTES - 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, 2 * SEGMENT_BYTES, 200_000)


@pytest.mark.parametrize("size", SIZES)
async def test_every_range_is_what_was_written(size):
    plain, store = os.urandom(size), EncryptedStore(MemoryStore(), os.urandom(32))
    assert await store.put_new("g/x", plain)
    assert bytes(await store.get("g/x", limit=size)) == plain
    assert [found.size for found in (await listing(store, "g/")).values()] == [size]
    dice = random.Random(size)
    for _ in range(50 if size else 0):
        first, last = sorted(dice.sample(range(size + 1), 2))
        assert bytes(await store.get("g/x", first, last, limit=last - first)) == plain[first:last]
    parts = [bytes(part) async for part in store.stream("g/x", size // 3, size)]
    assert b"".join(parts) == plain[size // 3 :]


async def test_nothing_else_is_believed():
    kept, plain = MemoryStore(), os.urandom(3 * SEGMENT_BYTES + 5)
    store = EncryptedStore(kept, os.urandom(32))
    await store.put_new("g/x", plain)
    sealed = bytes(await kept.get("g/x", limit=1 << 20))
    step, dice = SEGMENT_BYTES + 16, random.Random(1)
    changed = [
        sealed[:-1],
        sealed[: 16 + 2 * step],  # whole segments are missing
        sealed[:16] + sealed[16 + step :],
        sealed[:16] + sealed[16 + step : 16 + 2 * step] + sealed[16 : 16 + step] + sealed[16 + 2 * step :],
        sealed + sealed[-21:],
        b"",
        plain,
        *(bytes(byte ^ (1 << dice.randrange(8)) if at == place else byte for at, byte in enumerate(sealed))
          for place in [*range(17), *dice.sample(range(len(sealed)), 8)]),
    ]  # fmt: skip
    for data in changed:
        await kept.delete(["g/x"])
        await kept.put_new("g/x", data)
        with pytest.raises(WrongKeyError):
            await store.get("g/x", limit=1 << 20)
        with pytest.raises(WrongKeyError):
            b"".join([bytes(part) async for part in store.stream("g/x", 0, len(plain))])
    await kept.put_new("g/y", sealed)  # under another's name
    with pytest.raises(WrongKeyError):
        await store.get("g/y", limit=1 << 20)
    other = EncryptedStore(kept, os.urandom(32))
    with pytest.raises(WrongKeyError):
        await other.get("g/y", limit=1 << 20)


def test_an_asset_costs_half_a_per_cent_and_the_key_before_reads(tmp_path):
    old, new = os.urandom(32), os.urandom(32)
    kept = LocalStore(tmp_path / "sealed")
    catalog, _ = put(EncryptedStore(kept, old), PLAIN, list(range(600)))
    put(tmp_path / "plain", PLAIN, list(range(600)))

    def total(store):
        return sum(found.size for found in store.blocked(listing(store, "g/")).values())

    assert total(LocalStore(tmp_path / "plain")) < total(kept) <= 1.005 * total(LocalStore(tmp_path / "plain"))
    rotated = EncryptedStore(kept, new, old)
    assert check(open_store(rotated).open()) == catalog
    put(rotated, PLAIN, list(range(20)))
    with pytest.raises(KvabrError) as failed:
        open_store(EncryptedStore(kept, new)).open(catalog.namespace.prompt)
    assert isinstance(failed.value, AssetError)
    assert not is_damage(failed.value)


def test_a_player_with_the_key_plays_and_one_without_says_why(tmp_path, monkeypatch):
    (tmp_path / "key").write_bytes(os.urandom(32))
    (tmp_path / "other").write_bytes(os.urandom(32))
    url, tokens = f"file://{tmp_path}/objects", list(range(100))
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "key"))
    put(url, PLAIN, tokens)
    with Client(url, model=PLAIN) as client:
        assert client.play(tokens, deadline=60.0).tokens == 100
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "other"))
    with Client(url, model=PLAIN) as client, pytest.raises(KvabrError) as failed:
        client.play(tokens, deadline=60.0)
    assert "another key" in str(failed.value)
    monkeypatch.setenv(PREVIOUS_KEY_FILE, str(tmp_path / "key"))
    with Client(url, model=PLAIN) as client:
        assert client.play(tokens, deadline=60.0).tokens == 100
    monkeypatch.delenv(KEY_FILE)
    with Client(url, model=PLAIN) as client, pytest.raises(KvabrError):
        client.play(tokens, deadline=60.0)


def test_keys_are_read_from_files(tmp_path):
    key = os.urandom(32)
    path = tmp_path / "key"
    for written in (key, key.hex().encode() + b"\n"):
        path.write_bytes(written)
        assert read_key(path) == key
    for wrong in (b"", b"short", key + b"x", b"zz" * 32):
        path.write_bytes(wrong)
        with pytest.raises(UsageError):
            read_key(path)
    with pytest.raises(UsageError):
        EncryptedStore(MemoryStore(), b"short")
    with pytest.raises(UsageError):
        read_key(tmp_path / "nothing")


async def test_a_key_in_the_environment_is_that_of_every_store_that_is_named(tmp_path, monkeypatch):
    (tmp_path / "key").write_bytes(os.urandom(32))
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "key"))
    store = open_objects(tmp_path / "objects")
    await store.put_new("g/x", b"plain text")
    assert b"plain text" not in (tmp_path / "objects" / "g" / "x").read_bytes()
