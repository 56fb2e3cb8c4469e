"""Streams: payloads are the same on every path, in any number of threads, and directories that lie are refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import CoderModel, DecodeJob, cut, most_streams, usual_streams
from kvabr.codec.native.references import LANES
from kvabr.codec.native.streams import STREAMED, gathered_places, has_streams, rows_of_streams
from kvabr.types.errors import FormatError
from kvabr_lab.bench import coder_speed
from tests.codec.native import oracle
from tests.codec.native.conftest import NATIVE
from tests.codec.native.models import coder_model, some_references
from tests.examples import examples

ROWS = 300
STATES = 4 * LANES


def drawn(dice: np.random.Generator, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return indices of a base, and of a depth above it; some rows are zeros, some escape."""
    base = np.rint(dice.laplace(0, 1, (ROWS, tokens)) * dice.choice([0, 0.1, 1, 60], (ROWS, 1))).astype(np.int16)
    change = np.rint(dice.laplace(0, 1, base.shape)) * (dice.random((ROWS, 1)) < 0.6)
    return base, (3 * base + change).astype(np.int16)


@examples(15)
@given(
    seed=st.integers(0, 1 << 32),
    tokens=st.sampled_from((1, 64, 100, 128, 300)),
    streams=st.integers(1, most_streams(ROWS)),
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


def test_streams_have_all_rows_in_whole_runs() -> None:
    order = np.random.default_rng(0).permutation(ROWS).astype(np.uint32)
    for streams in range(1, most_streams(ROWS) + 1):
        parts = cut(order, streams)
        assert sorted(np.concatenate(parts)) == list(range(ROWS))
        assert [len(part) for part in parts] == rows_of_streams(ROWS, streams).tolist()
        assert min(map(len, parts)) >= LANES
        assert np.array_equal(parts[0][:LANES], order[:LANES])


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
            for n in (0, 1, 2, 4, most_streams(ROWS) + 1, 0xFFFF)
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


def test_payloads_are_gathered_as_their_directories_say() -> None:
    payloads = [model_and_payload(streams)[1] for streams in (1, 3, 4)]
    room, tokens, groups = gathered_places(payloads)[-1], [70] * 3, [5, 0, 9]
    out, copied, due = np.zeros(room, np.uint8), np.zeros(room, np.uint8), []
    for payload, at, group in zip(payloads, gathered_places(payloads), groups, strict=False):
        streams = oracle.directory(payload, ROWS, 70)
        count, states = len(streams.at), (at + streams.at) // 2
        words = states + 2 * LANES
        places = states, words, words + streams.words, streams.words, streams.escapes
        due += zip([group] * count, *map(np.ndarray.tolist, places), range(count), [count] * count, strict=True)
    parts = coder.gather(payloads, tokens, groups, ROWS, out)
    assert [tuple(part) for part in parts.tolist()] == due
    assert parts[:, 0].tolist() == [5, 0, 0, 0, 9, 9, 9, 9]
    assert np.array_equal(coder.gather(payloads, tokens, groups, ROWS, None), parts)
    coder.copy(payloads, copied)
    assert np.array_equal(copied, out)
    for payload, at in zip(payloads, gathered_places(payloads), strict=False):
        assert out[at : at + len(payload)].tobytes() == payload
    with pytest.raises(FormatError):
        coder.gather([payloads[0], payloads[1][:-2]], tokens[:2], groups[:2], ROWS, out)
    for short in (lambda out: coder.gather(payloads, tokens, groups, ROWS, out), lambda out: coder.copy(payloads, out)):
        with pytest.raises(TypeError):
            short(np.zeros(room - 17, np.uint8))


@pytest.mark.parametrize("shape", [coder_speed.SMOLLM2, coder_speed.LLAMA], ids=lambda shape: shape.name)
def test_streams_are_short_and_cost_little(shape: coder_speed.CacheShape) -> None:
    """At the rates of real groups: 0.2 bits an element for the base, and with the first layer 0.8."""
    sample = coder_speed.synthetic(shape, 0.205, 2)
    for model, payload, index, below in zip(
        sample.depths, sample.payloads, sample.indices, (None, sample.indices[0]), strict=True
    ):
        streams = usual_streams(model, 128)
        assert len(oracle.directory(payload, model.rows, 128).at) == streams > 1
        with coder.taking(""):
            alone = coder.encode_indices(model, index, below, streams=1)
        assert len(payload) <= 1.015 * len(alone)
        change = index if below is None else index - 3 * below.astype(np.int32)
        live = (change != 0).any(axis=1)
        longest = max(int(live[rows].sum()) for rows in cut(model.order, streams))
        assert 2 * longest <= 4608


def test_small_groups_have_one_stream() -> None:
    model = coder_model(np.random.default_rng(1), 100, refines=False)
    assert usual_streams(model, 128) == 1
    assert not has_streams(coder.encode_indices(model, np.zeros((100, 128), np.int16)))


def test_a_cache_is_the_same_from_any_number_of_streams_and_threads() -> None:
    sample = coder_speed.synthetic(coder_speed.CacheShape("small", 4, 2, 32, 2, 2, 8), 1.0, 2)
    payloads = [
        coder.encode_indices(model, index, below, streams=3)
        for model, index, below in zip(sample.depths, sample.indices, (None, sample.indices[0]), strict=True)
    ]
    outs = []
    for threads, coded in ((1, sample.payloads), (1, payloads), (2, payloads), (64, payloads)):
        out = torch.full((4, 2, 2, 128, 32), float("nan"))
        coder.decode(DecodeJob(sample.depths, coded, sample.transform, 0.1, 0, out), threads)
        outs.append(out)
    assert all(torch.equal(outs[0], out) for out in outs[1:])
