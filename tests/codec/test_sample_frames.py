"""Made-up frames: they decode, and are as large as those of a real cache."""

from __future__ import annotations

import pytest
import torch

from kvabr.codec.base import GroupContext
from kvabr.codec.group import decode_group, payload_of
from kvabr.codec.profile import Profile
from kvabr.codec.sample_frames import CHUNK, SampleFrames
from kvabr.data import default_catalog, default_profile_bytes


def test_they_decode_and_are_as_large_as_real_ones() -> None:
    catalog, profile = default_catalog(), Profile.from_bytes(default_profile_bytes())
    tokens = catalog.spec.group_tokens
    sample = SampleFrames(GroupContext(catalog.spec, tokens, tokens, profile))
    for track in catalog.tracks:
        frame, lower, below = sample.frame(track.name), track, []
        while lower.refines is not None:
            lower = catalog.track(lower.refines)
            below.insert(0, payload_of(sample.frame(lower.name)))
        out = torch.full(catalog.spec.shape(tokens), float("nan"), dtype=torch.float16)
        decode_group(frame, track.name, sample.context, CHUNK, 0, out, below)
        assert bool(torch.isfinite(out).all())
        # Source code takes fewer bits than the texts that the tables are of, and its tokens refer to others.
        assert len(frame) == pytest.approx(track.total_bytes / catalog.groups, rel=0.25), track.name
        again = SampleFrames(GroupContext(catalog.spec, tokens, tokens, profile))
        assert track.name != "AC-L3" or again.frame(track.name) == frame
