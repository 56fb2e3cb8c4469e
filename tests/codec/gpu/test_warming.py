"""Kernels are tried before they are needed, for every depth, layout and number of streams."""

import threading

import pytest
import torch

from kvabr.client import warming
from kvabr.client.memory import _known
from kvabr.codec import gpu
from kvabr.codec.block_slots import BlockLayers, TensorPlace
from kvabr.codec.fit import FitConfig, fit
from kvabr.codec.group import decode_payload
from kvabr.codec.native import coder
from kvabr.codec.paged import expand
from kvabr.codec.profile import Profile
from kvabr.data import default_profile_bytes
from tests.codec.gpu.conftest import DEVICE, on_device
from tests.kvdata import related, spec

pytest.importorskip("triton", reason="Triton is not installed: tools/setup-venv")

from kvabr.codec.gpu import decoder, together  # not without Triton

SHAPE = spec(1, 1, 8, group_tokens=16)


@pytest.fixture(scope="module")
def side():
    config = FitConfig(stack_layers=1, kept=(4, 4), classes=4, outliers=0.0)
    return fit(SHAPE, lambda: [related(SHAPE, 200, seed) for seed in range(2)], config)


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(gpu, "runs_on", on_device)
    monkeypatch.setattr(warming, "CROWDED", 3)
    monkeypatch.setattr(warming, "_ROWS_OF_A_STREAM", SHAPE.elements_per_token)
    monkeypatch.setattr(together, "CROWDED", 3)
    monkeypatch.setattr(warming, "_begun", {})
    monkeypatch.setattr(warming, "_layouts", {})


def test_every_depth_is_compiled_and_compared_few_and_many_at_once(side, few, monkeypatch):
    compared, own, batches, decode = [], together._own, [], decoder.decode_to_blocks
    monkeypatch.setattr(together, "_own", lambda task: compared.append(task) or own(task))
    monkeypatch.setattr(decoder, "decode_to_blocks", lambda jobs, to: batches.append(len(jobs)) or decode(jobs, to))
    keys = torch.full((4, 1, 8, 16), -7.0, dtype=torch.bfloat16, device=DEVICE)
    like = BlockLayers([[keys[..., :8], keys[..., 8:]]])
    warming.warm(side, DEVICE, like=[like])
    assert batches == [*[1] * len(side.depths), 3]
    assert len(compared) >= len(side.depths)
    assert bool((keys == -7.0).all())  # an engine's own blocks are left alone


def test_an_engine_does_so_in_the_background(side, few, monkeypatch):
    done = []
    monkeypatch.setattr(warming, "expand", lambda groups, _: done.append(len(groups)) or [None] * len(groups))
    spec = Profile.from_bytes(default_profile_bytes()).spec
    warming.warm_engine(spec, DEVICE, torch.float16).join(300)
    assert len(done) > 2
    assert _known(Profile.from_bytes(default_profile_bytes()).digest) is not None  # plays use the one that was compared
    assert warming.warm_engine(side.spec, DEVICE, torch.float16) is None  # kvabr ships none
    monkeypatch.setattr(warming, "expand", lambda *_: 1 / 0)
    warming.warm_engine(spec, DEVICE, torch.bfloat16).join(300)  # not an engine's problem
    monkeypatch.setattr(gpu, "runs_on", lambda _: False)
    assert warming.warm_engine(spec, DEVICE, torch.float16) is None
    warming.warm(side, DEVICE)  # decodes nothing: `expand` would raise


def test_a_play_tries_what_is_new_in_the_background_and_meanwhile_the_processor_decodes(side, few, monkeypatch):
    go, compiled, by_kernels, asked = threading.Event(), [], together._by_kernels, []
    group = next(warming._groups(side, SHAPE))

    def slowly(tasks):
        compiled.append(threading.current_thread().name)
        go.wait(300)
        by_kernels(tasks)

    monkeypatch.setattr(together, "_by_kernels", slowly)
    thread = warming.warm_in_background(side, DEVICE, torch.float32)
    assert warming.warm_in_background(side, DEVICE, torch.float32) is thread  # once
    out, wanted = (torch.zeros(SHAPE.shape(SHAPE.group_tokens), device=device) for device in (DEVICE, "cpu"))
    monkeypatch.setattr(coder, "decode_many", lambda jobs, made=coder.decode_many: asked.extend(jobs) or made(jobs))
    assert expand([group], [TensorPlace(out)]) == [None]
    assert asked  # of the processor, while the other thread waits for a compiler
    assert set(compiled) <= {"kvabr-warm"}
    decode_payload(group.payload, group.track, group.context, 0, wanted)
    assert torch.equal(out.cpu(), wanted)
    go.set()
    thread.join(300)
    out.zero_()
    assert expand([group], [TensorPlace(out)]) == [None]
    assert compiled[-1] != "kvabr-warm"
    assert torch.equal(out.cpu(), wanted)
