"""Upgrades into a cache that generate() reads: between two of its steps, never within one."""

import math
import threading

import pytest
import torch

from kvabr.client.blocking import Client
from kvabr.client.options import PlayOptions
from kvabr.engines.transformers import Steps, play_cache
from kvabr.engines.transformers.cache import cache_kv
from kvabr.types.cost import PrefillCost
from kvabr.types.errors import PlayError
from kvabr.types.peer import PeerOptions
from tests.client.coarse import COARSER
from tests.client.served import LIMIT_S, Served
from tests.engines.transformers.text import IDS, cold

pytestmark = pytest.mark.model
SLOW = PrefillCost.from_rate(1000.0)


@pytest.fixture
def link(root, tmp_path):
    served = Served(root, tmp_path)
    with Client(served.url, PeerOptions(fingerprint=served.fingerprint, timeout_s=LIMIT_S)) as client:
        yield client
    served.close()


@pytest.fixture
def coarse(link, engine):
    return play_cache(link, engine, IDS, deadline=LIMIT_S, options=PlayOptions(policy="fixed:Int4", recompute=False))


def test_what_is_written_reaches_the_growing_cache(engine, coarse):
    exact = engine.prefill(IDS[:400])
    kv, cache = coarse.played.kv, coarse.cache
    with Steps(engine, coarse) as steps:
        cold(engine.model, IDS, cache, 2)
        assert steps(128, 256, lambda: kv[:, :, :, 128:256].copy_(exact[:, :, :, 128:256]))
        cold(engine.model, IDS[:1] * 440, cache, 2)
    (held,) = cache_kv(cache, engine.spec, 400)
    assert torch.equal(held[:, :, :, 128:256], exact[:, :, :, 128:256])
    assert not torch.equal(held[:, :, :, :128], exact[:, :, :, :128])
    assert steps.rewritten == 1


def test_nothing_is_written_within_a_step_or_outside(engine, coarse):
    """The hook is called from another thread while the model is in its first layer."""
    written, within, begun = [], [], []
    steps = Steps(engine, coarse)
    assert not steps(0, 128, lambda: written.append(True))

    def during(*_):
        if not begun:
            thread = threading.Thread(target=lambda: steps(0, 128, lambda: written.append(True)))
            begun.append(thread)
            thread.start()
            thread.join(0.2)
            within.append(list(written))

    hook = engine.model.model.layers[0].register_forward_hook(during)
    with steps:
        cold(engine.model, IDS, coarse.cache, 3)
        begun[0].join(LIMIT_S)
    hook.remove()
    assert within == [[]]
    assert written == [True]
    assert not steps(0, 128, lambda: written.append(True))
    assert written == [True]


def test_a_step_that_fails_does_not_lock_the_cache(engine, coarse):
    with Steps(engine, coarse) as steps:
        with pytest.raises(IndexError):
            engine.model(torch.tensor([[999]]))
        assert steps(0, 128, lambda: None)


def test_late_upgrades_of_a_play_reach_the_cache(link, engine):
    """A policy that begins with the coarsest is handed over at once, and bettered while the text is generated."""
    options = PlayOptions(policy=COARSER, recompute=False, after=math.inf)
    ready = play_cache(link, engine, IDS, deadline=LIMIT_S, options=options)
    assert set(ready.played.coverage) == {"Int4"}
    assert ready.upgrades is not None
    with Steps(engine, ready) as steps:
        ready.upgrades.into(steps)
        assert ready.upgrades.join(LIMIT_S)
        assert set(ready.upgrades.coverage) == {"FP16"}
        (held,) = cache_kv(ready.cache, engine.spec, 400)
        assert steps.rewritten == 4
    assert torch.equal(held, ready.played.kv)
    exact = engine.prefill(IDS[:400])
    assert torch.allclose(held, exact, rtol=2e-3, atol=2e-3)


def test_an_origin_that_has_gone_and_no_engine(root, engine, tmp_path):
    served = Served(root, tmp_path)
    with Client(served.url, PeerOptions(fingerprint=served.fingerprint, timeout_s=LIMIT_S), engine=engine) as client:
        client.connect()
        served.close()
        with pytest.raises(PlayError):
            play_cache(client, engine, IDS, deadline=0.3, options=PlayOptions(recompute=False))
        ready = play_cache(client, engine, IDS, deadline=0.3, options=PlayOptions(prefill_cost=SLOW))
    assert set(ready.played.coverage) == {"recomputed"}
    assert ready.problem is not None
