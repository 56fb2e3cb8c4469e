"""The messages are those of vLLM 0.32 byte for byte; hostile ones are refused, and nothing else happens."""

import random

import msgspec
import pytest

from kvabr.telemetry.kv_events import wire
from kvabr.telemetry.kv_events.hashes import BlockHashes
from kvabr.telemetry.kv_events.wire import KVBlocksCleared, KVBlocksRemoved, KVBlocksStored, MessageDecoder
from kvabr.types.errors import FormatError, UsageError

TOKENS = [*range(20), 23, 24, 255, 256, 65535, 65536, 2**32 - 1, *range(70000, 70005)]
BY_VLLM = bytes.fromhex(
    "93cb3ff80000000000009388a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739201cfffffffffffffffffb170617265"
    "6e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da7"
    "53544f52414745a96c6f72615f6e616d65c083a474797065ac426c6f636b52656d6f766564ac626c6f636b5f6861736865739107a66d65646975"
    "6da753544f5241474581a474797065b0416c6c426c6f636b73436c656172656400"
)
"""What vLLM's own classes and encoder make of `EVENTS`."""
STORED = KVBlocksStored([1, 2**64 - 1], None, [1, 2, 3, 4], 2, medium="STORAGE")
EVENTS = [STORED, KVBlocksRemoved([7], "STORAGE"), KVBlocksCleared()]


def decoded(value):
    decoder = MessageDecoder()
    return decoder.events(value if isinstance(value, bytes) else msgspec.msgpack.encode(value)), decoder.skipped


def test_a_batch_is_vllms_own():
    assert wire.encoded(EVENTS, 1.5) == BY_VLLM
    assert decoded(BY_VLLM) == (EVENTS, 0)


def test_arrays_of_earlier_engines_are_read():
    more = [None, "GPU", None, [["salt"]], 0, "full_attention", None, 1, 2, 3]
    stored = [["BlockStored", [b"x" * 32], 5, [1, 2], 2, *more], ["BlockStored", [7], None, [1], 1]]
    events, skipped = decoded([1.0, [*stored, ["BlockRemoved", [7]], ["AllBlocksCleared"]]])
    assert skipped == 0
    assert (events[0].block_hashes, events[0].parent_block_hash, events[0].extra_keys) == ([b"x" * 32], 5, [["salt"]])
    assert events[1:] == [KVBlocksStored([7], None, [1], 1), KVBlocksRemoved([7]), KVBlocksCleared()]


@pytest.mark.parametrize(
    "event",
    [
        ["BlockMoved", 1],
        [],
        ["BlockStored", [7], None, ["a"], 1],
        ["BlockStored", [7], None, [1], 1 << 20],
        ["BlockRemoved", [b"x" * 65]],
        [["BlockRemoved"], [1]],
        {"type": "BlockRemoved"},
        {"type": 7},
        {"no": "type"},
        ["BlockRemoved", [1], "m" * 2000],
        ["AllBlocksCleared", *[0] * 40],
        "text",
        None,
        7,
    ],
)
def test_events_that_are_none_are_skipped(event):
    assert decoded([1.0, [event, {"type": "AllBlocksCleared", "new": 1}]]) == ([KVBlocksCleared()], 1)


def test_what_is_no_batch_is_refused():
    huge = msgspec.msgpack.encode([1.0, [{"no": bytes(wire.MAX_MESSAGE_BYTES)}]])
    for data in (b"", b"\xc1", msgspec.msgpack.encode([1.0]), b"\x91" * 100_000, huge):
        with pytest.raises(FormatError, match="KV events: "):
            decoded(data)
    for frame in (b"", b"\0" * 7, wire.END, b"\0" * 9):
        with pytest.raises(FormatError, match="not a sequence number"):
            wire.sequence_in(frame)
    assert wire.sequence_in(wire.sequence_frame(7)) == 7


def test_flipped_bytes_do_no_harm():
    dice = random.Random(3)
    for _ in range(3000):
        data = bytearray(BY_VLLM)
        for _ in range(dice.randrange(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        try:
            events, _ = decoded(bytes(data[: dice.randrange(len(data) + 1)]))
        except FormatError:
            continue
        assert all(isinstance(event, KVBlocksStored | KVBlocksRemoved | KVBlocksCleared) for event in events)


@pytest.mark.parametrize(
    ("algorithm", "seed", "last"),
    [
        ("sha256", None, "d1545f6e023a36e4336ed1e4410465e27809ec41885429db4e991c7cfefb7bba"),
        ("sha256_cbor", None, "b99ec6aa0158af96bbf769987f87fd64327b614e47b8dff9aa32c463d4b5606c"),
        ("sha256", "0", "0ff1ff4b3a893403eac154127b6061edcced98b74666fa149504a19b82740f67"),
        ("sha256_cbor", "0", "ac013f9b48cd70adb70b4a16df7ba29aa42450f73c8d16c9ab39a962944ced27"),
    ],
)
def test_blocks_have_vllms_names(algorithm, seed, last, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    hashes = BlockHashes(16, algorithm)
    assert hashes.full([*TOKENS, 1, 2, 3])[-1].hex() == last  # those of vLLM 0.32; what is no whole block has no name
    assert hashes.numbers(TOKENS)[-1] == int(last[-16:], 16)


def test_blocks_of_no_size_are_refused():
    for block in (0, 1 << 17):
        with pytest.raises(UsageError, match="vLLM: --block-size"):
            BlockHashes(block)
    with pytest.raises(UsageError, match="one of sha256, sha256_cbor"):
        BlockHashes(16, "xxhash")
