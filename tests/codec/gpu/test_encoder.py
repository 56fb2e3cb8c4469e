"""The encoder's transform in kernels: the bits of the processor, whatever the shape."""

import pytest
import torch

from kvabr.codec import gpu
from kvabr.codec.transform import Stack, Structure, layered, plain
from kvabr.types.kv import KVSpec, RopeSpec
from tests.codec.gpu.conftest import DEVICE, on_device
from tests.codec.native import oracle
from tests.codec.native.test_analysis import by, same, transform

pytest.importorskip("triton", reason="Triton is not installed: tools/setup-venv")

HALF = KVSpec.uniform("half", "t", 2, 2, 7, "float32", RopeSpec(10000.0, 6))
PARTIAL = KVSpec.uniform("partial", "t", 1, 2, 5, "float32", RopeSpec(10000.0, 4, "interleaved", factor=1.25))
STRUCTURES = {
    "blocks of two heads": layered(HALF, 2, (6, 10)),
    "a block for each head": layered(PARTIAL, 1, (4, 2), 1),
    "values first, and no blocks": Structure(PARTIAL, 1, (Stack(1, 0, 1, 2), Stack(0, 0, 1, 0))),
    "nothing to multiply": plain(PARTIAL),
}


def there(it, group, first=1000):
    return it.analyse(group.to(DEVICE), first).here()


def some(it, tokens, seed=0):
    group = 3 * torch.randn(it.structure.spec.shape(tokens), generator=torch.Generator().manual_seed(seed))
    group[:, :, :, tokens // 2] *= 40
    return group


@pytest.mark.parametrize("name", STRUCTURES)
def test_they_make_the_bits_of_the_oracle(name, monkeypatch):
    it = transform(STRUCTURES[name], 9)
    group = some(it, 9)
    wanted = by(oracle.ORACLE, it, group, 1000)
    monkeypatch.setattr(gpu, "runs_on", on_device)
    assert same(there(it, group), wanted)


def test_more_tokens_and_larger_vectors_than_a_tile_has(monkeypatch):
    spec = KVSpec.uniform("wide", "t", 1, 1, 67, "float32", RopeSpec(10000.0, 66))
    it = transform(Structure(spec, 1, (Stack(0, 0, 1, 66), Stack(1, 0, 1, 0))), 1)
    group = some(it, 65)
    wanted = by(oracle.ORACLE, it, group)
    monkeypatch.setattr(gpu, "runs_on", on_device)
    assert same(there(it, group, 0), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_floats_in_any_order_with_and_without_a_position(dtype, monkeypatch):
    it = transform(STRUCTURES["a block for each head"], 1)
    group = some(it, 5).to(dtype)
    spread = torch.zeros(10, 2, 1, 10, 2, dtype=dtype)[::2, :, :, ::2].permute(2, 4, 1, 0, 3)
    spread.copy_(group)
    wanted = by(oracle.ORACLE, it, group, None)
    monkeypatch.setattr(gpu, "runs_on", on_device)
    assert same(there(it, spread, None), wanted)


@pytest.mark.filterwarnings("ignore:overflow")  # in the interpreter, of numbers that are not used
def test_absurd_elements_are_limited_alike(monkeypatch):
    it = transform(STRUCTURES["blocks of two heads"], 2)
    group = some(it, 12)
    for token, size in enumerate((1e-44, 1e-30, 1e-3, 70.0, 1e4, 3e19, 3e38)):
        group[:, :, :, token] *= size
    group = group.clamp(-3e38, 3e38)
    wanted = by(oracle.ORACLE, it, group, 3)
    monkeypatch.setattr(gpu, "runs_on", on_device)
    assert same(there(it, group, 3), wanted)


def test_nothing_is_touched_that_is_not_theirs(guarded, monkeypatch):
    it = transform(STRUCTURES["a block for each head"], 3)
    group = some(it, 20)
    wanted, found = by(oracle.ORACLE, it, group, 0), []
    monkeypatch.setattr(gpu, "runs_on", on_device)
    guarded(group, lambda: found.append(there(it, group, 0)))
    assert same(found[0], wanted)
