"""Streams: payloads are the same on every path, in any number of threads, and directories that lie are refused."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import CoderModel, max_streams, usual_streams
from kvabr.codec.native.streams import STREAMED, has_streams
from kvabr.types.errors import FormatError
from tests.codec.native import oracle
from tests.codec.native.conftest import NATIVE
from tests.codec.native.models import coder_model, some_references
from tests.examples import examples

ROWS = 300


def drawn(dice: np.random.Generator, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return indices of a base, and of a depth above it; some rows are zeros, some escape."""
    base = np.rint(dice.laplace(0, 1, (ROWS, tokens)) * dice.choice([0, 0.1, 1, 60], (ROWS, 1))).astype(np.int16)
    change = np.rint(dice.laplace(0, 1, base.shape)) * (dice.random((ROWS, 1)) < 0.6)
    return base, (3 * base + change).astype(np.int16)


@examples(15)
@given(
    seed=st.integers(0, 1 << 32),
    tokens=st.sampled_from((1, 64, 100, 128, 300)),
    streams=st.integers(1, max_streams(ROWS)),
    refers=st.booleans(),
)
def test_every_path_makes_and_reads_the_same_streams(seed: int, tokens: int, streams: int, *, refers: bool) -> None:
    dice = np.random.default_rng(seed)
    base, above = drawn(dice, tokens)
    references = some_references(dice, tokens) if refers else None
    for index, below in ((base, None), (above, base)):
        model = coder_model(dice, ROWS, refines=below is not None)
        payload = oracle.encode_indices(model, index, below, references, streams)
        assert has_streams(payload) == (streams > 1)
        assert np.array_equal(oracle.decode_indices(model, payload, tokens, below, references), index)
        for path in NATIVE:
            with oracle.taking(path):
                for threads in (1, 3):
                    assert coder.encode_indices(model, index, below, references, streams, threads) == payload
                assert np.array_equal(coder.decode_indices(model, payload, tokens, below, references), index)


def model_and_payload(streams: int) -> tuple[CoderModel, bytes]:
    dice = np.random.default_rng(5)
    model = coder_model(dice, ROWS, refines=False)
    return model, oracle.encode_indices(model, drawn(dice, 70)[0], streams=streams)


def is_read(model: CoderModel, payload: bytes) -> bool:
    try:
        coder.decode_indices(model, payload, 70)
    except FormatError:
        return False
    return True


def test_directories_that_lie_are_refused_on_every_path() -> None:
    model, payload = model_and_payload(3)
    number = struct.unpack_from("<I", payload)[0]
    assert number == STREAMED + 3
    counts = list(struct.iter_unpack("<II", payload[4:28]))

    def with_counts(*changed: tuple[int, int]) -> bytes:
        return payload[:4] + b"".join(struct.pack("<II", *each) for each in changed) + payload[28:]

    (words, escapes), second, third = counts
    bad = {
        "one word less": with_counts((words - 1, escapes), second, third),
        "a word of the next one": with_counts((words + 1, escapes), (second[0] - 1, second[1]), third),
        "escapes for words": with_counts((words - 1, escapes + 1), second, third),
        "more escapes than symbols": with_counts((words, 1 << 30), second, third),
        "far too long": with_counts((0xFFFFFFFF, 0xFFFFFFFF), second, third),
        "exchanged": with_counts(second, (words, escapes), third),
        "cut": payload[:-2],
        "padded": payload + b"\0\0",
        "within the directory": payload[:20],
        "nothing but a number": payload[:4],
        **{
            f"{n} streams": struct.pack("<I", STREAMED + n) + payload[4:]
            for n in (0, 1, 2, 4, max_streams(ROWS) + 1, 0xFFFF)
        },
    }
    for path in oracle.PATHS:
        with oracle.taking(path):
            read = [what for what, changed in bad.items() if is_read(model, changed)]
            assert not read, path


def test_a_stream_that_is_damaged_is_noticed_wherever_it_is() -> None:
    model, payload = model_and_payload(4)
    whole = oracle.directory(payload, ROWS, 70)
    for at in (whole.at + 2).tolist():  # a state of each
        changed = bytearray(payload)
        changed[at] ^= 1
        for path in oracle.PATHS:
            with oracle.taking(path), pytest.raises(FormatError):
                coder.decode_indices(model, bytes(changed), 70)


def test_small_groups_have_one_stream() -> None:
    model = coder_model(np.random.default_rng(1), 100, refines=False)
    assert usual_streams(model, 128) == 1
    assert not has_streams(coder.encode_indices(model, np.zeros((100, 128), np.int16)))
