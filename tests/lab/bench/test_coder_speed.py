"""Speed of the coder, measured on synthetic groups."""

import pytest
import torch

from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import DecodeJob
from kvabr_lab.bench import coder_speed

pytestmark = pytest.mark.slow


def test_synthetic_groups_are_measured():
    tiny = coder_speed.CacheShape("tiny", 2, 2, 16, 1, 2, 4)
    sample = coder_speed.synthetic(tiny, 1.0, 3, tokens=64)
    assert sample.symbols == 2 * 2 * 2 * 16 * 64
    speed = coder_speed.measure(sample, seconds=0.001)
    assert min(speed.decode, speed.synthesise, speed.decode_indices, speed.encode_indices) > 0
    out = torch.empty(2, 2, 2, 64, 16)
    coder.decode(DecodeJob(sample.depths, sample.payloads, sample.transform, 1.0, 0, out))
    one = coder_speed.synthetic(tiny, 2.0, tokens=128)
    assert 1.5 < one.ideal_bits[0] / one.symbols < 2.5
