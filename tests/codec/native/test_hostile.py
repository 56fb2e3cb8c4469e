"""Invalid payloads: the same error on every path, in bounded time; never a crash."""

import random
import struct

import numpy as np
import pytest
import torch

from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import DecodeJob
from kvabr.codec.native.references import LANES
from kvabr.types.errors import FormatError
from tests.codec.native import oracle
from tests.codec.native.conftest import NATIVE
from tests.codec.native.models import Case, case
from tests.fuzz.mutation import mutate


def outcome(it: Case, payloads: list[bytes]) -> list[np.ndarray] | None:
    """Return the indices of each depth, or None if one is rejected."""
    out, below = [], None
    try:
        for model, payload in zip(it.models, payloads, strict=True):
            below = coder.decode_indices(model, payload, it.indices[0].shape[1], below, it.references)
            out.append(below)
    except FormatError:
        return None
    return out


def same(a: list[np.ndarray] | None, b: list[np.ndarray] | None) -> bool:
    if a is None or b is None:
        return a is b
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_every_truncation_is_refused(path: str) -> None:
    it = case(7, small=True, depths=1)
    (payload,) = it.encode()
    cuts = range(0, len(payload), 97 if path == oracle.ORACLE else 1)
    for cut in cuts:
        assert outcome(it, [payload[:cut]]) is None
    assert outcome(it, [payload + b"\0\0"]) is None
    assert outcome(it, [payload]) is not None


def test_counts_that_lie_are_refused(path: str) -> None:
    it = case(7, small=True, depths=1)
    (payload,) = it.encode()
    words, escapes = oracle.COUNTS.unpack_from(payload)
    lies = [
        (words + 1, escapes), (words + 1, escapes - 1), (words - 1, escapes + 1), (0, words + escapes),
        (2**32 - 1, escapes), (words, 2**32 - 1), (2**31, 2**31), (2**32 - 1, 2**32 - 1),
    ]  # fmt: skip
    for lie in lies:
        assert outcome(it, [struct.pack("<II", *(each % 2**32 for each in lie)) + payload[8:]]) is None


def test_an_escape_that_no_encoder_writes_is_refused(path: str) -> None:
    cases = (case(seed, small=True, depths=1) for seed in range(100))
    it, payload = next(
        (it, payload) for it in cases for payload in it.encode() if oracle.COUNTS.unpack_from(payload)[1]
    )
    assert outcome(it, [payload]) is not None
    assert outcome(it, [payload[:-2] + b"\x00\x80"]) is None


@pytest.mark.parametrize("seed", range(6))
def test_mutations_come_out_the_same_by_every_path(seed: int, use) -> None:
    """Most are rejected; the others (a changed escape) decode equally on every path."""
    it = case(100 + seed, small=True)
    good = it.encode()
    dice = random.Random(seed)
    accepted = 0
    for round_ in range(60):
        payloads = list(good)
        which = dice.randrange(len(payloads))
        if round_ % 3:  # only without changing the lengths
            data = bytearray(payloads[which])
            for _ in range(dice.randrange(1, 4)):
                data[dice.randrange(8, len(data))] ^= 1 << dice.randrange(8)
            payloads[which] = bytes(data)
        else:
            payloads[which] = mutate(payloads[which], good, dice)
        results = []
        for path in oracle.PATHS if round_ < 20 else NATIVE:
            use(path)
            results.append(outcome(it, payloads))
        assert all(same(result, results[0]) for result in results)
        accepted += results[0] is not None
    assert accepted < 60


def test_noise_that_is_far_larger_than_a_group_is_refused(path: str) -> None:
    """Random words decode to random indices, and decoding ends with the group, not with the words."""
    it = case(31, depths=1)
    dice = np.random.default_rng(0)
    words = dice.bytes(2 * 500_000)
    payload = oracle.COUNTS.pack(500_000, 0) + dice.bytes(4 * LANES) + words
    with pytest.raises(FormatError):
        coder.decode(it.job([payload], 1.0, 0, torch.empty(it.shape())))


def test_chains_and_tensors_that_do_not_fit_are_refused(path: str) -> None:
    it, other = case(7, small=True, depths=2), case(8, small=True, depths=1)
    payloads = it.encode()
    tokens = it.indices[0].shape[1]
    out = torch.empty(it.shape())
    bad = [
        (it.models[1:], payloads[1:], out),
        (it.models, payloads[:1], out),
        ((), (), out),
        ((it.models[0], it.models[0]), payloads, out),
        (other.models, payloads[:1], out),
        (it.models, payloads, out[0]),
        (it.models, payloads, out.int()),
        (it.models, payloads, out[:, :, :, :0]),
    ]
    assert other.rows != it.rows
    for models, data, tensor in bad:
        with pytest.raises(FormatError):
            coder.decode(DecodeJob(models, data, it.transform, 1.0, 0, tensor))
    with pytest.raises(FormatError, match="needs"):
        coder.decode_indices(it.models[1], payloads[1], tokens)
    with pytest.raises(FormatError, match="takes no"):
        coder.decode_indices(it.models[0], payloads[0], tokens, it.indices[0])


def test_indices_out_of_reach_are_not_encoded(path: str) -> None:
    it = case(7, small=True, depths=2)
    index, below = it.indices[1].astype(np.int32), it.indices[0].astype(np.int32)
    for value, under in ((32768, 0), (-32768, 0), (32767, 10_923), (0, 10_923), (-32767, 1000)):
        far, base = index.copy(), below.copy()
        far[0, 0], base[0, 0] = value, under
        with pytest.raises(FormatError, match="exact"):
            coder.encode_indices(it.models[1], far, base)
    far = below.astype(np.int16)
    far[0, 0] = -32768
    with pytest.raises(FormatError, match="exact"):
        coder.encode_indices(it.models[0], far)
