import contextlib
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from kvabr.codec.profile import Profile
from kvabr.codec.rope import rotate
from kvabr.errors import ForeignError, FormatError
from kvabr.kv import RopeSpec
from tests.kvdata import cache, profile, spec

SHAPE = spec(2, 2, 32)
GOOD = profile(SHAPE)


def test_round_trip_and_name():
    again = Profile.from_bytes(GOOD.to_bytes())
    assert again.digest == GOOD.digest
    assert again.spec == SHAPE
    for field in ("mean", "basis", "step", "table", "counts"):
        assert torch.equal(getattr(again, field), getattr(GOOD, field))
    assert profile(SHAPE).digest == GOOD.digest
    # Comparing tensors field by field would raise.
    assert again != GOOD
    assert len({again, GOOD}) == 2


def test_it_is_bound_to_its_model():
    with pytest.raises(ForeignError, match="kvabr calibrate"):
        GOOD.check(spec(2, 2, 64))


def parts(**changes):
    facts = {"format": "kvabr.profile/1", "sinks": 4, "spec": SHAPE.to_json()}
    arrays = {name: getattr(GOOD, name).contiguous() for name in ("mean", "basis", "step", "table", "counts")}
    for name, value in changes.items():
        (facts if name in facts else arrays)[name] = value
    return save({k: array for k, array in arrays.items() if array is not None}, metadata={"kvabr": json.dumps(facts)})


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "kvabr.profile/2"},
        {"sinks": -1},
        {"sinks": "many"},
        {"spec": {}},
        {"spec": None},
        {"mean": None},
        {"mean": GOOD.mean[:1].contiguous()},
        {"mean": torch.full_like(GOOD.mean, float("nan"))},
        {"basis": None},
        {"basis": GOOD.basis[..., :-1].contiguous()},
        {"basis": GOOD.basis.float().contiguous()},
        {"basis": torch.zeros(GOOD.basis.shape, dtype=torch.float16)},
        {"basis": GOOD.basis.contiguous() * 2},
        {"basis": torch.full(GOOD.basis.shape, float("nan"), dtype=torch.float16)},
        {"step": torch.zeros_like(GOOD.step)},
        {"step": GOOD.step.double()},
        {"step": torch.full_like(GOOD.step, 1e30)},
        {"step": torch.full_like(GOOD.step, float("nan"))},
        {"table": torch.full_like(GOOD.table, 200)},
        {"counts": GOOD.counts * 0},
        {"counts": GOOD.counts * 2},
        {"counts": GOOD.counts[:, :7].contiguous()},
    ],
)
def test_impossible_profiles_are_refused(changes):
    Profile.from_bytes(parts())
    with pytest.raises(FormatError):
        Profile.from_bytes(parts(**changes))


@given(st.binary(max_size=200))
def test_garbage_is_refused(data):
    with pytest.raises(FormatError):
        Profile.from_bytes(data)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_mutilated_files_are_read_or_refused(data):
    raw = bytearray(GOOD.to_bytes())
    raw[data.draw(st.integers(0, 2000))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FormatError):
        Profile.from_bytes(bytes(raw[: data.draw(st.integers(0, len(raw)))]))


def test_calibration_needs_tokens_and_the_right_shape():
    with pytest.raises(FormatError, match="longer"):
        Profile.calibrate(SHAPE, lambda: [cache(SHAPE, 4)])
    with pytest.raises(FormatError, match="shape"):
        Profile.calibrate(SHAPE, lambda: [cache(spec(1, 1, 32), 40)])


@given(
    st.sampled_from(["half", "interleaved"]),
    st.integers(0, 100_000),
    st.sampled_from([2, 16, 30, 32]),
    st.floats(100, 1e6),
)
def test_rope_undone_and_redone_is_the_identity_and_keeps_lengths(layout, first, rotary, theta):
    keys = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(first))
    rope = RopeSpec(theta, rotary, layout)
    turned = rotate(keys, rope, first)
    assert torch.allclose(rotate(turned, rope, first, undo=True), keys, atol=1e-5)
    assert torch.allclose(turned.norm(dim=-1), keys.norm(dim=-1), rtol=1e-5)
    assert torch.equal(turned[..., rotary:], keys[..., rotary:])


def test_rope_is_relative():
    """What attention sees, the product of a query and a key, depends on their distance alone."""
    rope = RopeSpec(10000.0, 32)
    query, key = torch.randn(1, 1, 32), torch.randn(1, 1, 32)
    near = (rotate(query, rope, 7) * rotate(key, rope, 3)).sum()
    far = (rotate(query, rope, 1007) * rotate(key, rope, 1003)).sum()
    assert float(near) == pytest.approx(float(far), abs=1e-4)
