"""What ships with the package: a profile that decodes what its catalog promises, and a catalog of a real encode."""

import hashlib
from importlib.resources import files

import pytest

import kvabr.data
from kvabr.codec.profile import Profile
from kvabr.data import default_catalog, default_profile_bytes
from kvabr.types.naming import LAYERS


def test_the_catalog_is_a_real_one_and_small():
    catalog = default_catalog()
    assert (catalog.tokens, catalog.groups, catalog.spec.layers) == (8064, 63, 30)
    assert {track.name for track in catalog.tracks} == {"FP16", "BF16", "FP8", "Int8", "Int4", "AC-5x", *LAYERS}
    assert len(files(kvabr.data).joinpath(kvabr.data.CATALOG).read_bytes()) < 100_000
    assert catalog.prefill is not None
    assert catalog.source
    for track in catalog.tracks:
        assert track.measured is not None
        assert sum(track.loss) == pytest.approx(track.measured.loss, rel=1e-3)
        assert 0 < track.decode_s < 0.5
    ratio = {track.name: catalog.fp16_bytes / track.total_bytes for track in catalog.tracks}
    assert ratio["AC-5x"] >= 5.0
    assert ratio["AC-L0"] >= 40.0
    assert ratio["Int8"] > 1.88
    assert ratio["Int4"] > 3.7


def test_the_profile_is_the_one_that_the_catalog_names():
    catalog, data = default_catalog(), default_profile_bytes()
    assert len(data) < 0.03 * 269e6  # of what the weights have at 16 bits
    assert (hashlib.sha256(data).hexdigest(), len(data)) == (catalog.profile, catalog.profile_bytes)
    Profile.from_bytes(data).check(catalog.spec)


def test_it_says_what_is_left_behind_tails():
    catalog = default_catalog()
    for track in catalog.tracks:
        assert [tail.tokens for tail in track.tails] == [25, 152, 537]
        assert all(0.1 < tail.spread < 1.5 for tail in track.tails)
        left = [tail.share for tail in track.tails]
        assert left == sorted(left, reverse=True)
    base = catalog.track("AC-L0")
    assert catalog.with_tail(catalog.groups - 1, 152).track("AC-L0").total_loss < 0.3 * base.total_loss
