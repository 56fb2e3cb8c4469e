"""Upgrades of a cache of several layer classes that is in use: every class but states, at its own tokens."""

import math

import pytest
import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from tests.client.classes import HYBRID, SLIDING, WINDOWS, link, numbers, published
from tests.client.coarse import COARSE
from tests.client.virtual import virtual

TOKENS = list(range(150))
SPECS = {"sliding": SLIDING, "hybrid": HYBRID, "windows": WINDOWS}


@pytest.fixture(scope="module", params=SPECS)
def spec(request):
    return SPECS[request.param]


@pytest.fixture(scope="module")
def library(tmp_path_factory, spec):
    return published(tmp_path_factory.mktemp("classes"), spec, TOKENS)


@virtual
async def test_every_class_but_states_gets_better_in_use(library, spec):
    written = []

    def rewrite(first, last, write):
        written.append((first, last))
        write()
        return True

    options = PlayOptions(policy=COARSE, after=math.inf)
    async with link(library) as peer, AsyncClient(peer, model=spec, options=options) as client:
        played = await client.play(TOKENS, deadline=2.0)
        assert set(played.coverage) == {"Int8"}
        before, loss = [kv.clone() for kv in played.parts], played.loss
        played.upgrades.into(rewrite)
        await played.upgrades.wait()
        kinds = [spec.classes[played.catalog.unit(group).part].kind for group in range(played.catalog.groups)]
        assert played.upgrades.coverage == tuple("Int8" if kind == "state" else "FP16" for kind in kinds)
        assert played.upgrades.loss < loss
    units = [unit for unit, kind in zip(played.catalog.units, kinds, strict=True) if kind != "state"]
    assert sorted(written) == sorted((unit.first, unit.first + unit.tokens) for unit in units)
    parts = zip(played.parts, before, numbers(spec, TOKENS), played.spans, spec.classes, strict=True)
    for kv, was, exact, span, only in parts:
        if only.kind == "state":
            assert torch.equal(kv, was)
        else:
            assert torch.equal(kv.float(), exact[:, :, :, span.first :])
            assert not torch.equal(kv, was)
