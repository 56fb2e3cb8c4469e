"""Requests with pictures: they share a cache only with the same picture at the same place."""

from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.client.served import Served
from tests.engines.vllm.halves import Bench, medium, request

PICTURE = (20, 16)
"""Its first token, and how many there are: in the second group of four, and the third."""


@pytest.fixture
def seen(tmp_path):
    """An origin with the cache of a prompt with a picture."""
    (tmp_path / "assets").mkdir()
    with closing(Bench(Served(tmp_path / "assets", tmp_path), tmp_path / "assets")) as bench:
        asked = request("mine", mm_features=[medium(*PICTURE, 0.5)])
        assert bench.matched(asked) == (0, False)
        bench.prefilled()
        assert bench.scheduler.finished(asked, [list(range(9))])
        bench.steps()
        bench.published()
    served = Served(tmp_path / "assets", tmp_path)
    yield served
    served.close()


@pytest.mark.parametrize(
    ("media", "tokens"),
    [
        ([medium(*PICTURE, 0.5, identifier="another name")], 64),
        ([medium(*PICTURE, 0.25, identifier="picture 0.5")], 16),  # vLLM believes the client's name of a picture
        ([medium(*PICTURE, 0.5, data={"pixel_values": SimpleNamespace(data=torch.full((4, 1), 0.5))})], 16),
        ([medium(*PICTURE, 0.5, data={"pixels": SimpleNamespace(data=torch.full((2, 2), 0.5))})], 16),
        ([medium(*PICTURE, 0.5, modality="video")], 16),
        ([medium(19, 17, 0.5)], 16),
        ([medium(20, 15, 0.5)], 16),
        ([medium(*PICTURE, 0.5), medium(40, 2, 0.5)], 32),
        ([medium(*PICTURE, 0.5), medium(66, 2, 0.5)], 64),
        ([], 16),
    ],
)
def test_a_cache_is_played_as_far_as_pictures_are_the_same(seen, media, tokens):
    with closing(Bench(seen)) as bench:
        assert bench.load(request(mm_features=media))[0] == tokens


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (None, "start it without --mm-processor-cache-type shm"),
        ({"pixels": SimpleNamespace(data=object())}, "as object, which kvabr cannot compare"),
        ({"pixels": SimpleNamespace(data=torch.ones(1, device="meta"))}, "that kvabr cannot read (Cannot copy"),
        ({"names": SimpleNamespace(data=np.array(["a"]))}, "that kvabr cannot read (can't convert"),
    ],
)
def test_a_picture_that_cannot_be_told_from_others_is_neither_played_nor_published(seen, tmp_path, data, why):
    bench, told = Bench(seen, tmp_path / "out"), []
    bench.scheduler._trouble.warn = lambda _, why: told.append(why)
    try:
        asked = request(mm_features=[medium(*PICTURE, 0.5, data=data)])
        assert bench.matched(asked) == (0, False)
        assert not bench.scheduler.finished(asked, [list(range(9))])
        counted = bench.scheduler.counts.take()
        assert (counted["lookups_unfit"], counted["publish_skipped_unfit"]) == (1, 1)
        assert why in told[-1]
        assert not bench.scheduler._pictures._pending
    finally:
        bench.close()


def test_lossy_blocks_are_shared_as_vllm_shares_them(seen):
    """vLLM's prefix cache uses its own name of a picture."""
    with closing(Bench(seen, keep_loss=0.0)) as bench:
        kept = bench.scheduler._kept
        mine = request("mine", mm_features=[medium(2, 16, 0.5)])
        kept.begin(mine, 0.1, 0, 64, [list(range(8))])
        kept.lost("mine", 1.0, 1.0)
        for value, shares in ((0.5, True), (0.25, False)):
            asked = request(f"with {value}", mm_features=[medium(2, 16, value), medium(66, 2, 0.1)])
            assert kept._reaches(asked, 64, kept._lossy["mine"]) is shares
