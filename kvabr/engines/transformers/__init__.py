"""Hugging Face transformers: plays a prompt's cache into a `DynamicCache` for ``generate()``.

    model = AutoModelForCausalLM.from_pretrained("./my-llama")
    engine = engine_of(model, "./my-llama")
    with kvabr.Client("moqt://origin.example/", engine=engine) as client:
        ready = play_cache(client, engine, input_ids, deadline=2.0)
        output = model.generate(input_ids, past_key_values=ready.cache, max_new_tokens=64)

The longest cached prefix is played; late groups are computed in place (mode ``hole``), and the model computes uncached
tokens. `publish_cache` publishes the cache of a prefill; `prefill_live` does so during the prefill. `Steps` allows
upgrades of a cache while ``generate()`` reads it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvabr.engines.adapters import Adapter

if TYPE_CHECKING:
    from kvabr.engines.transformers.engine import TransformersEngine
    from kvabr.engines.transformers.model_loader import engine_of
    from kvabr.engines.transformers.publish import cache_publisher, prefill_live, prefill_prompt, publish_cache
    from kvabr.engines.transformers.ready_cache import ReadyCache, Steps, play_cache, play_cache_async
    from kvabr.engines.transformers.spec import spec_of

__all__ = [
    "ADAPTER",
    "ReadyCache",
    "Steps",
    "TransformersEngine",
    "cache_publisher",
    "engine_of",
    "play_cache",
    "play_cache_async",
    "prefill_live",
    "prefill_prompt",
    "publish_cache",
    "spec_of",
]

ADAPTER = Adapter(
    name="transformers",
    package="transformers",
    module="kvabr.engines.transformers",
    tested=("5.17", "5.25"),
    mode="hole",
    layout="a layer each of keys and values [1, head, token, dim]",
    rate="timed once",
    upgrades=True,
    plays="blocking or async",
    passages="recomputed",
)

_HOMES = {
    "ReadyCache": "ready_cache",
    "Steps": "ready_cache",
    "TransformersEngine": "engine",
    "cache_publisher": "publish",
    "engine_of": "model_loader",
    "play_cache": "ready_cache",
    "play_cache_async": "ready_cache",
    "prefill_live": "publish",
    "prefill_prompt": "publish",
    "publish_cache": "publish",
    "spec_of": "spec",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use: listing the adapters should not load torch, and a model alone needs no client."""
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
