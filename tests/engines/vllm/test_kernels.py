"""Plays are decoded by AC's kernels into the engine's blocks; in Triton's interpreter, without a GPU."""

from contextlib import closing

import pytest
import torch

from kvabr.client import play
from kvabr.client.memory import keep
from kvabr.codec import gpu
from kvabr.codec.fit import fit
from kvabr.engines.layouts import BlockLayout
from kvabr.engines.player_process import client as remote
from kvabr.engines.settings import OWN
from tests.client.served import Served
from tests.codec.gpu.conftest import DEVICE, interpreter  # noqa: F401  # a fixture
from tests.engines.paging import paged_blocks
from tests.engines.vllm.halves import BLOCK, TOKENS, Bench, request
from tests.toymodel import SPEC, ToyModel, prompt, toy_asset

pytest.importorskip("triton", reason="Triton is not installed: tools/setup-venv")

from kvabr.codec.gpu import decoder  # not without Triton

pytestmark = [pytest.mark.process, pytest.mark.slow]

NUMBERS = list(range(5, 25))


@pytest.fixture(autouse=True)
def tried(monkeypatch):
    """The kernels have run before the play: none is compiled during it."""
    for module in (play, remote):
        monkeypatch.setattr(module, "warm_in_background", lambda *_, **__: None)


@pytest.fixture(scope="module")
def coded(tmp_path_factory):
    """An origin with the toy model's cache on AC tracks."""
    folder, side = tmp_path_factory.mktemp("ac"), fit(SPEC, lambda: iter([ToyModel().prefill(prompt(200).tokens)]))
    toy_asset(folder / "one", ("FP16", "Int8", "AC-L0", "AC-5x"), profile=side)
    served = Served(folder, tmp_path_factory.mktemp("tls"))
    served.profile = side
    yield served
    served.close()


def played(served, layout, policy, **options):
    """The contents of the blocks of a played request."""
    keep(served.profile)
    with closing(Bench(served, policy=f"fixed:{policy}", deadline_s=200.0, **options)) as bench:
        bench.named = {name: cache.to(DEVICE) for name, cache in bench.named.items()}
        bench.caches = list(bench.named.values())
        bench.worker.register(bench.named, lambda _: layout)
        assert bench.load(request(tokens=TOKENS[:40]), blocks=NUMBERS) == (32, set())
        heads = bench.caches[0].shape[1]
        out = torch.empty(SPEC.layers, 2, heads, 4 * BLOCK, SPEC.head_dim, device=DEVICE)
        paged_blocks(bench.caches, NUMBERS[:4], layout).read(out)
        return out.cpu()


@pytest.mark.parametrize(
    ("layout", "track", "options"),
    [
        (BlockLayout.PLAIN, "AC-5x", {}),
        (BlockLayout.TRANSPOSED, "AC-L0", {}),
        (BlockLayout.PLAIN, "AC-L0", {"heads": range(1, 2)}),
        (BlockLayout.PLAIN, "AC-L0", {"player": OWN}),
    ],
    ids=["straight", "keys transposed", "a rank's heads", "from another process"],
)
def test_a_play_is_decoded_into_blocks_in_one_batch(coded, home, monkeypatch, layout, track, options):
    monkeypatch.setattr(gpu, "runs_on", lambda _: False)
    wanted = played(coded, layout, track, **options)
    batches, decode = [], decoder.decode_to_blocks

    def counted(jobs, blocks):
        batches.append(len(jobs))
        decode(jobs, blocks)

    monkeypatch.setattr(gpu, "runs_on", lambda _: True)
    monkeypatch.setattr(decoder, "decode_to_blocks", counted)
    assert torch.equal(played(coded, layout, track, **options), wanted)
    assert batches == [2]  # and no group by the processor


def test_groups_of_other_tracks_go_beside_them(coded, monkeypatch):
    monkeypatch.setattr(gpu, "runs_on", lambda _: False)
    wanted = played(coded, BlockLayout.PLAIN, "Int8")
    monkeypatch.setattr(gpu, "runs_on", lambda _: True)
    assert torch.equal(played(coded, BlockLayout.PLAIN, "Int8"), wanted)


def test_what_kernels_cannot_do_the_processor_does(coded, monkeypatch, recwarn):
    monkeypatch.setattr(gpu, "runs_on", lambda _: False)
    wanted = played(coded, BlockLayout.PLAIN, "AC-L0")
    monkeypatch.setattr(gpu, "runs_on", lambda _: True)

    def broken(jobs, blocks):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(decoder, "decode_to_blocks", broken)
    assert torch.equal(played(coded, BlockLayout.PLAIN, "AC-L0"), wanted)
    said = [str(each.message) for each in recwarn if "on the processor" in str(each.message)]
    recwarn.clear()
    assert len(said) == 1
