"""One vLLM publishes, and another, in a process of its own with nothing in its prefix cache, plays over QUIC.

A small random model with windows always runs. With KVABR_GEMMA, a folder that tools/gemma-model made, so does Gemma 3
270M, on every level; KVABR_GEMMA_PROFILE names its codec profile, which is calibrated otherwise.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: tools/engine vllm")

from tests.engines.vllm.engine import TEXT, RealEngine
from tests.engines.vllm.layered import LAYERS
from tests.engines.vllm.origin import ROOT
from tests.engines.vllm.other import OtherEngine
from tests.engines.vllm.tinies import tiny_gemma
from tests.engines.vllm.world import SMALL, VllmWorld
from tests.needs import GEMMA as NEEDS_GEMMA

pytestmark = pytest.mark.model

GEMMA = os.environ.get("KVABR_GEMMA")
POLICIES = {layer: f"{Path(__file__).parent / 'layered.py'}:UpTo{layer[3:]}" for layer in LAYERS}
SAID = 48
"""Tokens that are compared."""


class World(VllmWorld):
    """An engine's published cache and its text, and another engine without either."""

    def __init__(self, folder, model, *, block, length, most, tracks=("FP16", "Int8"), profile=None):
        from tokenizers import Tokenizer

        super().__init__(folder)
        self.tracks = tracks
        self.prompt = Tokenizer.from_file(str(model / "tokenizer.json")).encode(TEXT).ids[:length]
        options = SMALL | {"max_model_len": most, "block_size": block}
        more = {} if profile is None else {"profile": str(profile)}
        producer = OtherEngine(model, self.publishing(*tracks, **more), "kv_producer", **options)
        self.cold = producer.generate(self.prompt, SAID)
        producer.close()
        self.origin.wait_for_assets()
        self.engine = RealEngine(model, self.playing(), "kv_consumer", **options)
        self.last = (length - 1) // self.engine.half._model.block * self.engine.half._model.block
        self.last = min(self.last, length // 128 * 128)

    def played(self, track):
        """The other engine's text after the cache on a track, and its counters."""
        worker = self.engine.worker
        worker._settings = worker._settings.model_copy(update={"policy": POLICIES.get(track, f"fixed:{track}")})
        return self.says(self.prompt, SAID)


def gemma_profile(folder):
    given = os.environ.get("KVABR_GEMMA_PROFILE")
    if given:
        return Path(given)
    out = folder / "gemma.profile.safetensors"
    options = ["--contexts", "6", "--context-tokens", "640", "--target-kl", "0.004"]
    command = [sys.executable, "-m", "kvabr", "calibrate", "--model", str(GEMMA), *options, "--out", str(out)]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)})  # noqa: S603  # ours
    return out


@pytest.fixture(
    scope="module",
    params=["tiny", pytest.param("gemma", marks=pytest.mark.skipif(not GEMMA, reason=NEEDS_GEMMA))],
)
def world(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "tiny":
        world = World(folder, tiny_gemma(folder / "model"), block=32, length=500, most=768)
    else:
        tracks, profile = ("FP16", "Int8", *LAYERS), gemma_profile(folder)
        world = World(folder, Path(GEMMA), block=128, length=1200, most=2048, tracks=tracks, profile=profile)
    yield world
    world.close()


def test_the_other_engine_says_the_same(world):
    """The first test: nothing was computed in this engine before."""
    text, counted = world.played("FP16")
    assert text == world.cold
    assert counted["lookups_hit"] == counted["plays"] == 1
    assert counted["tokens_loaded"] == world.last
    assert "tokens_missed" not in counted


def test_int8_says_the_same(world):
    if len(world.prompt) < 1000:
        pytest.skip("random weights have no text that small changes leave alone")
    text, counted = world.played("Int8")
    assert counted["tokens_loaded"] == world.last
    assert text == world.cold


def test_ac_layers_are_played(world):
    """They are lossy: the text may part from the other one."""
    if "AC-L3" not in world.tracks:
        pytest.skip("AC is not published")
    fetched = []
    for track in (*LAYERS, "FP16"):
        text, counted = world.played(track)
        agree = sum(one == other for one, other in zip(text, world.cold, strict=True))
        first = next((at for at, pair in enumerate(zip(text, world.cold, strict=True)) if len(set(pair)) > 1), SAID)
        print(f"{track}: {agree} of {SAID} tokens agree, the first {first}; {counted['bytes_fetched']:,.0f} bytes")
        assert counted["tokens_loaded"] == world.last
        fetched.append(counted["bytes_fetched"])
    assert fetched == sorted(fetched)
    assert text == world.cold  # FP16: what was lossy has left nothing behind
