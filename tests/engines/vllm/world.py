"""Shared by a module's tests with the real vLLM: an engine, and an origin that serves its publications."""

from dataclasses import replace
from functools import partial

import torch

from tests.engines.vllm.origin import ServedFolder

SMALL = {"max_model_len": 768, "block_size": 32, "skip_tokenizer_init": True, "max_num_batched_tokens": 256}
"""Options of an engine with a small model, which computes a prompt in several steps."""


def zeroed(monkeypatch, blocks, part):
    """From now on zeros are written where a layer class's cache belongs."""
    place = type(blocks)._place

    def nothing(write, kv):
        write(torch.zeros_like(kv))

    def other(self, group, unit, *rest):
        found = place(self, group, unit, *rest)
        if found is None or unit.part != part:
            return found
        return replace(found, direct=None, writes=tuple(partial(nothing, write) for write in found.writes))

    monkeypatch.setattr(type(blocks), "_place", other)


class VllmWorld:
    def __init__(self, folder):
        self.assets = folder / "assets"
        self.assets.mkdir()
        self.origin = ServedFolder(self.assets, folder)

    def playing(self, **more):
        """Settings of an engine that plays on one track, with time enough for a busy machine."""
        return {
            "url": f"moqt://127.0.0.1:{self.origin.port}/",
            "fingerprint": self.origin.fingerprint,
            "deadline_s": 60.0,
            "policy": "fixed:FP16",
            "prefill_rate": 100.0,  # slower than it is, so that plays wait for the network and not for their turn
            "store_mib": 0,
        } | more

    def publishing(self, *tracks, **more):
        """Settings of an engine that publishes to the origin's store."""
        return {"publish": str(self.assets), "tracks": list(tracks), **more}

    def says(self, prompt, tokens=16, *, forget=True, salt=None, lora=None, media=None, **params):
        """The engine's text after a prompt, and its counters; by default it does not publish."""
        if forget:
            self.engine.forget()
        self.engine.counted()
        params = {"kv_transfer_params": {"publish": False} | params}
        (text,) = self.engine.generate([prompt], tokens, salt, lora, media, **params)
        self.engine.settle()
        return list(text), self.engine.counted()

    def close(self):
        self.engine.close()
        self.origin.close()
