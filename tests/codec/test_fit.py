"""The calibration of a profile for the AC tracks: what it needs, and what does not spoil it."""

import dataclasses
import functools

import pytest

from kvabr.codec.fit import fit
from kvabr.codec.profile import Profile
from kvabr.types.errors import FormatError, UsageError
from tests.codec.native import oracle
from tests.codec.test_ac import FIRST, SHAPE, SMALL, decode, encode
from tests.kvdata import cache, related, spec

pytestmark = pytest.mark.slow


@functools.cache
def fitted_to(values, transform):
    """Return a profile of caches, two numbers of each of which are spoilt by a value."""

    def caches():
        for seed in range(3):
            kv = related(SHAPE, 400, seed)
            if values:
                kv[2, 1, 0, 30 + seed, 7] = kv[4, 0, 1, 99, 3] = values[seed]
            yield kv

    return fit(SHAPE, caches, dataclasses.replace(SMALL, transform=transform))


@pytest.mark.parametrize("values", [(float("nan"), float("inf"), -1e30), (60000.0, 60000.0, 60000.0)])
@pytest.mark.parametrize("transform", [True, False])
def test_absurd_numbers_do_not_spoil_a_calibration(values, transform):
    good, spoilt = (fitted_to(each, transform) for each in ((), values))
    spoilt = Profile.from_bytes(spoilt.to_bytes())
    kv = related(SHAPE, 200, 50, FIRST)
    sizes = [sum(map(len, encode(kv, side))) for side in (good, spoilt)]
    assert sizes[1] < 1.02 * sizes[0]
    assert float((decode(encode(kv, spoilt), spoilt, 200) - kv).norm() / kv.norm()) < 0.1


@pytest.mark.parametrize(
    "change", [{"sinks": 65}, {"sinks": -1}, {"steps": {"AC-5x": float("nan")}}, {"steps": {"AC-5x": 2000}}]
)
def test_what_no_profile_can_have_is_refused_before_the_work(change):
    with pytest.raises(UsageError):
        dataclasses.replace(SMALL, **change)


def test_calibration_needs_tokens_and_the_right_shape():
    with pytest.raises(FormatError, match="longer"):
        fit(SHAPE, lambda: [related(SHAPE, 1, 0)])
    with pytest.raises(FormatError, match="longer"):
        fit(SHAPE, list)
    with pytest.raises(FormatError, match="shape"):
        fit(SHAPE, lambda: [cache(spec(1, 1, 32), 40)])


def test_every_path_of_the_coder_fits_the_same_profile():
    """Copies of tokens, so that references count; one context has a short second step, one has none."""

    def caches():
        for seed, tokens in enumerate((400, 220, 30)):
            kv = related(SHAPE, tokens, seed)
            if tokens > 100:
                kv[:, 1, :, 70:100] = kv[:, 1, :, :30] + kv[:, 1, :, 70:100] / 50
            kv[2, :, :, 9] *= 30
            yield kv

    config = dataclasses.replace(SMALL, dead={"AC-L0": 0.1})
    made = {}
    for path in oracle.PATHS:
        with oracle.taking(path):
            made[path] = fit(SHAPE, caches, config)
    assert all(depth.coder.near is not None for depth in made[oracle.ORACLE].depths.values())
    assert len({profile.digest for profile in made.values()}) == 1
