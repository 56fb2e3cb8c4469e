"""Groups encoded on a device, from their numbers to payloads: the bytes of the processor, whatever the group."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from kvabr.codec import ac, gpu
from kvabr.codec.base import GroupContext, codec
from kvabr.codec.coefficients import Coefficients, error_sums, hold, indices
from kvabr.codec.gpu import batches
from kvabr.codec.gpu.batches import Batches
from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import Quantiser
from kvabr.publish.frames import FrameEncoder, MemoryFrames
from kvabr.types.errors import FormatError
from tests.codec.gpu.cases import SHAPE, fitted
from tests.codec.gpu.conftest import DEVICE, on_device
from tests.codec.test_ac import chain_of, encode
from tests.kvdata import related

pytest.importorskip("triton", reason="Triton is not installed: tools/setup-venv")

from kvabr.codec.gpu import encoding, writer  # not without Triton


@pytest.fixture
def there(monkeypatch):
    """Have kernels do it, also in the interpreter."""
    return lambda: monkeypatch.setattr(gpu, "runs_on", on_device)


def usual(tokens):
    return related(SHAPE, tokens, 5)


def outliers(tokens):
    kv = usual(tokens)
    kv[:, :, :, 7] *= 30
    kv[:, :, :, 40:42] *= 1e4
    return kv


def repeated(tokens):
    return usual(tokens)[:, :, :, :9].repeat(1, 1, 1, -(-tokens // 9), 1)[:, :, :, :tokens]


def crowded(tokens):
    kv = usual(tokens)
    kv[:, :, :, ::3] *= 50
    return kv


@pytest.mark.parametrize(
    ("make", "track"),
    # The interpreter is slow; what is set aside or repeated is found before the first layer.
    [(usual, "AC-L3"), (outliers, "AC-5x"), (repeated, "AC-5x"), (crowded, "AC-5x")]
    if DEVICE.type == "cpu"
    else [(make, track) for make in (usual, outliers, repeated, crowded) for track in ("AC-L3", "AC-5x")],
)
def test_payloads_are_those_of_the_processor(make, track, there):
    kv = make(70 if make is usual or DEVICE.type != "cpu" else 44)
    wanted = encode(kv, fitted(), track, 0)
    there()
    context, given, made = GroupContext(SHAPE, 0, kv.shape[3], fitted(), memo={}), kv.to(DEVICE), []
    for name in chain_of(track):
        made.append(codec(name).encode(given, context, made))
    assert made == wanted


def test_what_choices_are_made_by_is_the_same(there):
    dice = np.random.default_rng(1)
    rows = torch.from_numpy(dice.normal(0, 3, (40, 30)).astype(np.float32))
    rows[3, 4], rows[5, 6] = 1e9, -1e30
    which, coded = np.sort(dice.permutation(40)[:17]).astype(np.intp), dice.random((2, 30)) < 0.8
    quantiser, gains = Quantiser(0.37, 0.16), dice.uniform(0.8, 1.2, 17).astype(np.float32)

    def chosen_by(rows):
        groups = [Coefficients(each, *torch.zeros(3, 30)) for each in (rows, rows.flip(0))]
        sums = error_sums(
            [(group.rows, own) for group, own in zip(groups, coded, strict=True)], which, gains, quantiser
        )
        hold(groups[1:], which)
        return *sums, *(group.some(which) for group in groups), indices(rows[:3], quantiser)

    here = chosen_by(rows)
    there()
    for one, other in zip(here, chosen_by(rows.to(DEVICE)), strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("fault", ["raises", "other bytes"])
def test_the_processor_encodes_what_kernels_cannot(there, monkeypatch, recwarn, fault):
    kv = usual(20)
    wanted = encode(kv, fitted(), "AC-L1", 0)
    made, calls = writer.encode_many, []

    def wrongly(jobs):
        calls.append(len(jobs))
        if fault == "raises":
            raise RuntimeError("no kernel image")
        return [bytes(each)[:-1] + b"\xff" for each in made(jobs)]

    there()
    monkeypatch.setattr(writer, "encode_many", wrongly)
    monkeypatch.setattr(encoding, "_checked", lambda _job, known={}: known)  # of this test alone
    batches._warn.cache_clear()
    context, given, payloads = GroupContext(SHAPE, 0, 20, fitted(), memo={}), kv.to(DEVICE), []
    for name in chain_of("AC-L1"):
        payloads.append(codec(name).encode(given, context, payloads))
    assert payloads == wanted
    assert calls
    said = [str(each.message) for each in recwarn if "encoded on the processor" in str(each.message)]
    recwarn.clear()
    assert len(said) == (1 if fault == "raises" else len(set(said)))
    assert said


def test_what_threads_ask_for_meanwhile_is_done_together():
    batches, go = [], threading.Event()

    def work(jobs):
        batches.append(len(jobs))
        go.wait(300)
        return [FormatError("odd") if job % 2 else 10 * job for job in jobs]

    it = Batches(torch.device("cpu"), work)
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(it.run, [0])
        while not batches:
            pass
        others = [pool.submit(it.run, [job, job + 10]) for job in range(1, 5)]
        while len(it._waiting) < 4:
            pass
        go.set()
        assert first.result() == [0]
        found = [each.result() for each in others]
    assert batches == [1, 8]
    assert [type(each) for each in found[0]] == [FormatError, FormatError]
    assert found[1] == [20, 120]


def test_a_depth_out_of_reach_is_an_error_of_its_own_group(there):
    there()
    model = next(iter(fitted().of(SHAPE).depths.values())).coder
    rows = torch.zeros(model.rows, 5, device=DEVICE)
    far = rows.clone()
    far[0, 0] = 1e9
    keep, own = np.ones(5, bool), Quantiser(1.0, 0.0)
    made = encoding.encode([writer.EncodeJob(model, each, own, None, keep) for each in (rows, far, rows)])
    wanted = coder.encode_rows(model, rows.cpu().numpy(), own, None, keep)
    assert (made[0], made[2]) == (wanted, wanted)
    try:
        assert made[1] == coder.encode_rows(model, far.cpu().numpy(), own, None, keep)
    except FormatError:
        assert isinstance(made[1], FormatError)


def test_without_memory_for_many_groups_are_encoded_one_by_one(there, monkeypatch):
    kv, frames = related(SHAPE, SHAPE.group_tokens + 9, 6), []
    for device in (torch.device("cpu"), DEVICE):
        store = MemoryFrames()
        FrameEncoder(SHAPE, ["a" * 64, "b" * 64], kv.shape[3], ("AC-L0", "AC-L1"), fitted(), store).encode(
            (kv.to(device),)
        )
        frames.append(store.frames)
        there()

        def full(*_):
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(ac, "_prepare", full)
    assert frames[0] == frames[1]
