"""Kernels are tried before they are needed, for every depth, layout and number of streams."""

import pytest
import torch

from kvabr.client import warming
from kvabr.client.profiles import _known
from kvabr.codec import gpu
from kvabr.codec.block_slots import BlockLayers
from kvabr.codec.fit import FitConfig, fit
from tests.codec.gpu.conftest import DEVICE
from tests.kvdata import related, spec

pytest.importorskip("triton", reason="Triton is not installed (kvabr[gpu])")

from kvabr.codec.gpu import decoder, together  # not without Triton

SHAPE = spec(1, 1, 8, group_tokens=16)


@pytest.fixture(scope="module")
def side():
    config = FitConfig(stack_layers=1, kept=(4, 4), classes=4, outliers=0.0)
    return fit(SHAPE, lambda: [related(SHAPE, 200, seed) for seed in range(2)], config)


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(gpu, "runs_on", lambda _: True)
    monkeypatch.setattr(warming, "CROWDED", 3)
    monkeypatch.setattr(warming, "_ROWS_OF_A_STREAM", SHAPE.elements_per_token)
    monkeypatch.setattr(together, "CROWDED", 3)


def test_every_depth_is_compiled_and_compared_few_and_many_at_once(side, few, monkeypatch):
    compared, own, batches, decode = [], together._own, [], decoder.decode_to_blocks
    monkeypatch.setattr(together, "_own", lambda task: compared.append(task) or own(task))
    monkeypatch.setattr(decoder, "decode_to_blocks", lambda jobs, to: batches.append(len(jobs)) or decode(jobs, to))
    keys = torch.full((4, 1, 8, 16), -7.0, dtype=torch.bfloat16, device=DEVICE)
    like = BlockLayers([[keys[..., :8], keys[..., 8:]]])
    warming.warm(side, DEVICE, like=[like])
    assert batches == [len(side.depths), 3]
    assert len(compared) >= len(side.depths)
    assert bool((keys == -7.0).all())  # an engine's own blocks are left alone


def test_an_engine_does_so_in_the_background(side, few, monkeypatch):
    done = []
    monkeypatch.setattr(warming, "expand", lambda groups, _: done.append(len(groups)) or [None] * len(groups))
    thread = warming.warm_in_background(lambda: side, DEVICE, torch.float16)
    thread.join(60)
    assert len(done) == 2
    assert _known(side.digest) is side  # plays use the one that was compared
    broken = warming.warm_in_background(lambda: 1 / 0, DEVICE, torch.float16)
    broken.join(60)
    monkeypatch.setattr(gpu, "runs_on", lambda _: False)
    assert warming.warm_in_background(lambda: side, DEVICE, torch.float16) is None
    assert warming.warm(side, DEVICE) == 0
