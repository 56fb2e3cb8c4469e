"""SmolLM2 from its package: all tests that need the real model in their process, which takes long to load it."""

import re
from functools import partial

import pytest
import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.codec.profile import Profile
from kvabr.engines.transformers import model_loader, play_cache_async, smollm2
from kvabr.publish.calibrate import STAGES, calibrate
from kvabr.publish.texts import measuring_texts
from kvabr.replay.verify import ComputeStep, FetchStep, verify_play
from kvabr.server.grants import EVERYTHING
from kvabr.server.published_assets import PublishedAssets
from kvabr.types.errors import ModelError, UsageError
from kvabr.types.kv import RopeSpec
from kvabr.types.loss import predicted_loss
from tests.memory_transport import Fault, MemoryConnection, MemoryLink
from tests.test_examples import ROOT, run

pytestmark = pytest.mark.model


def test_spec(loaded):
    spec = loaded.engine.spec
    assert (spec.model, spec.layers, spec.kv_heads, spec.head_dim) == (smollm2.NAME, 30, 3, 64)
    assert spec.rope == RopeSpec(100000.0, 64, "half")
    assert (spec.dtype, spec.fp16_bytes(1)) == ("float16", 23_040)
    assert (loaded.engine.context, loaded.engine.mode, loaded.engine.dtype) == (8192, "hole", torch.float32)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  leading and trailing spaces  \n\n\n\t",
        "naïve 中文 🎈 \x00\x7f",
        "1234567890 3.14159e-10",
        "<|im_start|>user\nhello<|im_end|>\n",
        "def f(x):\n    return x ** 2  # square\r\n",
        measuring_texts()["manual"][:20_000],
        measuring_texts()["source"][:20_000],
    ],
)
def test_the_tokenizer_round_trips(loaded, text):
    tokens = loaded.encode(text)
    assert loaded.decode(tokens) == text
    assert all(0 <= token < 49152 for token in tokens)


def test_the_model_reads_english(loaded):
    """Wrongly permuted or transposed weights would leave it guessing among 49,152 tokens: 10.8 nats."""
    tokens = loaded.encode(measuring_texts()["manual"][:4000])[:400]
    scores = loaded.engine.score(loaded.engine.prefill(tokens[:200]), tokens[200:])
    following = torch.tensor(tokens[201:])[:, None]
    assert -scores[:-1].gather(1, following).mean() < 3.0


def test_a_hole_is_filled_exactly(loaded):
    tokens = loaded.encode(measuring_texts().get("licence", "text " * 300))[:384]
    whole = loaded.engine.prefill(tokens)
    hole = loaded.engine.prefill(tokens[128:256], whole[:, :, :, :128])
    assert (hole - whole[:, :, :, 128:256]).abs().max() < 1e-3


def test_a_file_of_something_else_is_refused(monkeypatch, tmp_path):
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF but not really" * 10)
    monkeypatch.setattr(smollm2, "find_gguf", lambda: other)
    with pytest.raises(ModelError, match="not the SmolLM2 file"):
        smollm2.load()


def text(loaded, ids, cache=None):
    given = torch.tensor([ids])
    output = loaded.engine.model.generate(
        given, attention_mask=torch.ones_like(given), past_key_values=cache, max_new_tokens=16, do_sample=False
    )
    return loaded.decode(output[0, len(ids) :].tolist())


@pytest.fixture(scope="module")
def prompt(asset):
    made = asset.prompt()
    return [*made.tokens, *made.continuation[:8]]


@pytest.fixture(scope="module")
def cold(loaded, prompt):
    return text(loaded, prompt)


@pytest.mark.parametrize(("track", "lost"), [("FP16", None), ("Int8", None), ("FP16", 1)])
async def test_the_same_greedy_text(loaded, asset, prompt, cold, track, lost):
    def faults(ask):
        return Fault(refuse=0x10) if ask.group == lost and ask.track in asset.catalog.by_name else None

    find = partial(PublishedAssets(asset.store).find, EVERYTHING)
    options = PlayOptions(policy=f"fixed:{track}", gpu_price=float("inf"))
    async with (
        MemoryConnection(find, MemoryLink(1e8, 0.01), faults=faults) as link,
        AsyncClient(link, engine=loaded.engine, options=options) as client,
    ):
        ready = await play_cache_async(client, loaded.engine, prompt, deadline=300.0)
    assert ready.tokens == 300
    assert ready.played.coverage == tuple("recomputed" if group == lost else track for group in range(3))
    assert text(loaded, prompt, ready.cache) == cold


def test_plays_with_forced_misses_are_verified(asset, loaded):
    """The first group late and recomputed exactly, a hole, a missing end: none is left, all are predicted."""
    for steps in (
        [FetchStep(0, "Int4"), FetchStep(2, "FP8"), ComputeStep(1, 2)],
        [FetchStep(0, "FP8"), ComputeStep(1, 3)],
        [FetchStep(2, "Int4"), FetchStep(1, "AC-5x"), FetchStep(1, "FP8"), ComputeStep(0, 1)],
    ):
        verified = verify_play(asset, loaded.engine, steps)
        assert 0.5 < verified.predicted / verified.loss < 2.0, (steps, verified)
        assert verified.top1 > 0.8
    exact = verify_play(asset, loaded.engine, [ComputeStep(0, 1), ComputeStep(1, 3)])
    assert exact.kl < 1e-6
    fp16 = verify_play(asset, loaded.engine, [FetchStep(group, "FP16") for group in range(3)])
    assert fp16.kl < 1e-5
    assert fp16.predicted == predicted_loss(asset.catalog, ["FP16"] * 3)


def test_a_profile_is_calibrated(loaded):
    seen, texts = [], {"a": "some text " * 200}
    (profile,) = calibrate(loaded, texts, contexts=1, tokens=64, progress=lambda *at: seen.append(at))
    assert seen == [(stage, 1, 1) for stage in STAGES]
    profile.check(loaded.engine.spec)
    assert Profile.from_bytes(profile.to_bytes()).digest == profile.digest
    # The model minds some channels more than others, and its profile knows.
    assert float(profile.transform.norm.max() / profile.transform.norm.min()) > 3
    with pytest.raises(UsageError, match="16 to 8192 tokens"):
        calibrate(loaded, {"a": "x"}, tokens=8193)


@pytest.mark.process
def test_the_example_of_two_engines(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(model_loader, "load_model", lambda _: loaded)
    out = run("two_engines", ROOT / "CHANGELOG.md", folder=tmp_path)
    assert "published: published" in out
    assert re.search(r"played: (128|256|384) tokens", out)  # the rest is computed with the question, if that pays
