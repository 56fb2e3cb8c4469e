"""Prompts with pictures: played up to where these are others; an engine of token ids is refused."""

from __future__ import annotations

import pytest

import kvabr
from kvabr.data import default_catalog
from kvabr.publish.publisher import Publisher
from tests.client.served import Served
from tests.toymodel import SPEC, ToyModel, prompt

IDS = prompt(70).tokens


def seen(digest):
    return kvabr.MediaTokens(IDS, [kvabr.Medium(20, 16, digest * 64)])


def test_a_prompt_with_a_picture_is_played_as_far_as_it_is_the_same(tmp_path):
    made = Publisher(tmp_path / "assets", SPEC, prior=default_catalog(), tracks=["FP16"])
    made.reserve(seen("a")).fill(ToyModel().prefill(IDS), lambda _: None)
    made.close()
    served = Served(tmp_path / "assets", tmp_path)
    options = kvabr.PlayOptions(policy="fixed:FP16")
    try:
        with kvabr.Client(served.url, fingerprint=served.fingerprint, options=options, quic="aioquic") as client:
            for tokens, played in ((seen("a"), 70), (seen("b"), 16), (IDS, 16)):
                assert client.play(tokens, deadline=60.0, model=SPEC).tokens == played
            for play in (client.play, client.play_asset):
                name = () if play == client.play else (kvabr.TrackNamespace(SPEC.model, "0" * 64),)
                given = {"tokens": seen("a"), "engine": ToyModel(), "deadline": 1.0}
                with pytest.raises(kvabr.UsageError, match="some of these stand for media"):
                    play(*name, **given)
    finally:
        served.close()
