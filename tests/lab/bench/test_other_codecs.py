"""Peers: programs of other environments, that answer, fail, or end."""

import sys
from pathlib import Path

import pytest
import torch

from kvabr.types.errors import AssetError
from kvabr_lab.bench.measure import CacheStore
from kvabr_lab.bench.other_codecs import LMCacheCodec, PeerError, PeerProcess, Zstd
from kvabr_lab.bench.schemes import TrackScheme
from tests import kvdata

pytestmark = pytest.mark.slow

SPEC = kvdata.spec(layers=12)

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


def test_zstd_gets_the_payloads_and_leaves_the_cache_alone(tmp_path):
    store = CacheStore(tmp_path / "work", SPEC)
    cache = kvdata.cache(SPEC, 200).half()
    with PeerProcess(make(tmp_path, "zstd", STORE), "zstd") as peer:
        coded = Zstd("Int8", 1, SPEC, peer, store).code(cache)
    plain = TrackScheme("Int8", SPEC).code(cache)
    assert torch.equal(coded.cache, plain.cache)
    assert coded.nbytes == pytest.approx(plain.nbytes / 2, rel=0.01)
