"""SmolLM2 from its package: the tokenizer round-trips, the model reads English, holes are filled exactly."""

from functools import partial

import pytest
import torch

from kvabr.client.async_client import AsyncClient
from kvabr.client.options import PlayOptions
from kvabr.engines.transformers import play_cache_async, smollm2
from kvabr.publish.texts import measuring_texts
from kvabr.server.grants import EVERYTHING
from kvabr.server.published_assets import PublishedAssets
from kvabr.types.errors import ModelError
from kvabr.types.kv import RopeSpec
from tests.memory_transport import Fault, MemoryConnection, MemoryLink

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
        ready = await play_cache_async(client, loaded.engine, prompt, deadline=20.0)
    assert ready.tokens == 300
    assert ready.played.coverage == tuple("recomputed" if group == lost else track for group in range(3))
    assert text(loaded, prompt, ready.cache) == cold
