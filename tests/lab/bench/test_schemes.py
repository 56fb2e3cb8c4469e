"""Schemes: sizes that count everything, caches as a reader would see them."""

import sys
from pathlib import Path

import pytest
import torch

from kvabr.codec.base import payload_layout
from kvabr.codec.container import header_bytes
from kvabr.types.errors import AssetError
from kvabr_lab.bench.kvtc import SINKS, Kvtc, learn_bases
from kvabr_lab.bench.measure import CacheStore
from kvabr_lab.bench.other_codecs import CacheGenQuantiser, LMCacheCodec, PeerError, PeerProcess
from kvabr_lab.bench.rivals import EngineFp8, Kivi, NvFp4, TurboQuant
from kvabr_lab.bench.schemes import TrackScheme
from tests import kvdata

pytestmark = pytest.mark.slow

SPEC = kvdata.spec(layers=12)


@pytest.fixture(scope="module")
def cache():
    return kvdata.cache(SPEC, 200).half()


def test_a_track_counts_frames_and_decodes_as_a_player_does(cache):
    coded = TrackScheme("Int4", SPEC).code(cache)
    payloads = sum(payload_layout("Int4", SPEC, tokens).payload_bytes for tokens in (128, 72))
    assert coded.nbytes == payloads + 2 * header_bytes("Int4")
    assert (coded.cache - cache).abs().max() < 2.0
    assert torch.equal(TrackScheme("FP16", SPEC).code(cache).cache, cache)


def test_a_finer_end_is_of_the_last_group_alone():
    spec = kvdata.spec()
    cache, profile = kvdata.cache(spec, 200).half(), kvdata.profile(spec)
    base, fine = (TrackScheme(name, spec, profile).code(cache) for name in ("AC-L0", "AC-L2"))
    mixed = TrackScheme("AC-L0", spec, profile, end="AC-L2").code(cache)
    assert torch.equal(mixed.cache[:, :, :, :128], base.cache[:, :, :, :128])
    assert torch.equal(mixed.cache[:, :, :, 128:], fine.cache[:, :, :, 128:])
    assert base.nbytes < mixed.nbytes < fine.nbytes


@pytest.mark.parametrize(("bits", "steps"), [(2, 3), (4, 15)])
def test_kivi_rounds_within_half_a_step_and_counts_its_scales(cache, bits, steps):
    coded = Kivi(bits, group_tokens=128).code(cache)
    assert 8 * coded.nbytes / cache.numel() == pytest.approx(bits + 1, abs=0.1)  # 32 bits of scale for 32 elements
    part = cache[:, 1, :, :, :32].float()
    reach = (part.amax(dim=-1) - part.amin(dim=-1)) / steps
    error = (coded.cache[:, 1, :, :, :32].float() - part).abs().amax(dim=-1)
    assert (error <= 0.51 * reach + 0.02).all()


def test_cachegens_quantiser_has_its_levels(cache):
    made = CacheGenQuantiser().code(cache).cache
    for layer, which, levels in ((0, 0, 31), (11, 0, 15), (1, 1, 31), (2, 1, 15)):
        token = made[layer, which, :, 5]
        peak = cache[layer, which, :, 5].abs().max()
        index = token.float() / peak.float() * (levels // 2)
        assert (index - index.round()).abs().max() < 0.02
        assert index.abs().max().round() == levels // 2
        assert len(index.round().unique()) <= levels
    # Models of fewer layers have the finest levels throughout.
    shallow = CacheGenQuantiser().code(cache[:4]).cache
    assert len((shallow[3, 1, :, 5].float() / cache[3, 1, :, 5].abs().max().float() * 15).round().unique()) > 15


@pytest.mark.parametrize(("bits", "error"), [(2, 0.117), (3, 0.034), (4, 0.0095)])
def test_turboquant_loses_what_its_paper_says(bits, error):
    cache = torch.randn(2, 2, 2, 256, 64, generator=torch.Generator().manual_seed(1)).half()
    coded = TurboQuant(bits).code(cache)
    assert 8 * coded.nbytes / cache.numel() == bits + 16 / 64
    lost = (coded.cache.float() - cache.float()).square().sum() / cache.float().square().sum()
    assert float(lost) == pytest.approx(error, rel=0.05)


def test_the_formats_of_engines_round_to_their_levels(cache):
    eight = EngineFp8().code(cache)
    assert eight.nbytes == cache.numel()
    assert torch.equal(eight.cache, cache.to(torch.float8_e4m3fn).to(cache.dtype))
    four = NvFp4().code(cache)
    assert 8 * four.nbytes / cache.numel() == pytest.approx(4.5, abs=0.01)
    block = cache[3, 1, 0, 7, :16].float()
    # The largest step is that between 4 and 6 sixths of the largest element, whose scale has 3 bits of fraction.
    assert (four.cache[3, 1, 0, 7, :16].float() - block).abs().max() <= block.abs().max() * (1 / 6 + 1 / 16)


def test_kvtc_keeps_what_its_paper_keeps_and_undoes_its_transform(cache):
    basis = learn_bases(SPEC, (kvdata.cache(SPEC, 300, seed) for seed in range(1, 4)))
    coded, kept = (Kvtc(4, SPEC, [basis], recent=recent, group_tokens=128).code(cache) for recent in (0, 128))
    assert torch.equal(coded.cache[:, :, :, :SINKS], cache[:, :, :, :SINKS])
    assert torch.equal(kept.cache[:, :, :, -128:], cache[:, :, :, -128:])
    assert kept.nbytes > coded.nbytes
    middle = slice(SINKS, -128)
    error = (coded.cache - cache).float()[:, :, :, middle].square().sum()
    assert float(error) < 0.02 * float(cache.float()[:, :, :, middle].square().sum())


ECHO = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request["word"] == "die":
        sys.exit(3)
    print(json.dumps({"error": "no such word"} if request["word"] == "bad" else {"said": request["word"]}), flush=True)
"""

# A codec that stores: a cache comes back as it was, or shifted.
STORE = """
import json, sys
from safetensors.torch import load_file, save_file
for line in sys.stdin:
    request = json.loads(line)
    kv = load_file(request["in"])
    sizes = [1000 + end - first for first, end in request.get("groups", [])]
    sizes = sizes or [part.numel() // 2 for part in kv.values()]
    if request.get("out"):
        save_file({"kv": kv["kv"] + 1}, request["out"])
    print(json.dumps({"bytes": sizes}), flush=True)
"""


def make(folder: Path, name: str, program: str) -> Path:
    (folder / name / "bin").mkdir(parents=True)
    python = folder / name / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (folder / name / "worker.py").write_text(program)
    return folder


def test_a_peer_answers_until_it_is_let_go_and_its_errors_and_its_end_are_told(tmp_path):
    with PeerProcess(make(tmp_path, "echo", ECHO), "echo") as peer:
        assert [peer.ask({"word": word}) for word in ("one", "two")] == [{"said": "one"}, {"said": "two"}]
        process = peer._process
        for word in ("bad", "die"):
            with pytest.raises(PeerError):
                peer.ask({"word": word})
    assert process.poll() is not None


def test_a_decoder_that_disagrees_with_the_quantiser_is_not_compared(tmp_path):
    store = CacheStore(tmp_path / "work", SPEC)
    cache = kvdata.cache(SPEC, 300).half()
    with PeerProcess(make(tmp_path, "lmcache", STORE), "lmcache") as peer:
        assert LMCacheCodec(peer, store).code(cache, decode=False).nbytes == 3 * 1000 + 300
        with pytest.raises(AssetError, match="differs from that of its quantiser"):
            LMCacheCodec(peer, store).code(cache)
    assert not list(tmp_path.glob("work/*/*.safetensors"))
