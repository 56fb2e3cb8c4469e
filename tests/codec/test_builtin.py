"""Token-separable levels: a run of tokens needs the head and its own units, and nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvabr.codec.base import GroupContext, codec
from kvabr.types.errors import FormatError
from kvabr.types.naming import LEVELS
from tests.examples import examples
from tests.kvdata import cache, spec

SEPARABLE = [*(track for track in LEVELS if track != "AC-5x"), "Raw"]
SHAPES = [(3, 3, 64), (1, 8, 128), (2, 1, 80), (1, 1, 129), (3, 1, 5), (1, 7, 9)]


def encoded(track, sizes, tokens):
    shape = spec(*sizes, group_tokens=256, rope=None)
    context = GroupContext(shape, 0, tokens)
    payload = codec(track).encode(cache(shape, tokens), context)
    return context, payload, codec(track).layout(shape, tokens)


def decoded(track, context, payload):
    out = torch.empty(context.spec.shape(context.tokens))
    codec(track).decode(memoryview(payload), context, out)
    return out


def bounds(layout, unit):
    """Bytes and tokens of one unit."""
    begin = layout.head_bytes + unit * layout.unit_bytes
    size = layout.unit_bytes if unit < layout.units - 1 else layout.last_bytes
    first = unit * layout.unit_tokens
    return (begin, begin + size), (first, min(layout.tokens, first + layout.unit_tokens))


@examples(60)
@given(st.sampled_from(SEPARABLE), st.sampled_from(SHAPES), st.integers(2, 150), st.data())
def test_a_run_decodes_from_the_head_and_its_own_units(track, sizes, tokens, data):
    context, payload, layout = encoded(track, sizes, tokens)
    whole = decoded(track, context, payload)
    first = data.draw(st.integers(0, layout.units - 1))
    last = data.draw(st.integers(first, layout.units - 1))
    (begin, _), (first_token, _) = bounds(layout, first)
    (_, end), (_, last_token) = bounds(layout, last)
    alone = payload[: layout.head_bytes] + bytes(begin - layout.head_bytes) + payload[begin:end]
    out = decoded(track, context, alone + bytes(len(payload) - end))
    assert torch.equal(out[:, :, :, first_token:last_token], whole[:, :, :, first_token:last_token])


@pytest.mark.parametrize("track", SEPARABLE)
def test_a_payload_of_another_size_is_refused(track):
    context, payload, _ = encoded(track, (2, 2, 32), 70)
    for wrong in (b"", payload[:-1], payload + b"\0"):
        with pytest.raises(FormatError, match="bytes of payload instead of"):
            decoded(track, context, wrong)


@pytest.mark.parametrize("track", SEPARABLE)
def test_groups_beyond_one_run_decode_as_those_within(track):
    """A large model's group is coded in several runs, without seams."""
    shape = spec(32, 8, 128, rope=None)
    kv = cache(shape, 70)
    context = GroupContext(shape, 0, 70)
    out = decoded(track, context, codec(track).encode(kv, context))
    assert float((out - kv).norm() / kv.norm()) < {"FP4": 0.14, "Int4": 0.13}.get(track, 0.05)
    first, last = (out[:, :, :, part] - kv[:, :, :, part] for part in (slice(32), slice(64, 70)))
    assert 0.5 < float(first.square().mean() / last.square().mean()) < 2.0 or track in {"FP16", "BF16", "Raw"}
