"""Caches of several layer classes for plays: whole numbers, which every 16-bit float holds exactly."""

import math
from functools import partial

import torch

from kvabr.publish.frames import FrameEncoder
from kvabr.server.grants import EVERYTHING
from kvabr.server.published_assets import PublishedAssets
from kvabr.store.locations import open_store
from kvabr.store.prompt import Prompt
from kvabr.types.kv import KVSpec, LayerClass
from kvabr.types.naming import chain
from kvabr.types.units import snapshot_ends
from tests.memory_transport import MemoryConnection, MemoryLink

SLIDING = KVSpec(
    "test/sliding",
    "tokenizer",
    (
        LayerClass("full", (0,), 2, 8, 8, "float16"),
        LayerClass("window", (1, 2), 2, 8, 4, "float16", window=40),
        LayerClass("chunked", (3,), 1, 8, 8, "float16", window=64),
        LayerClass("latent", (4,), 1, 12, 0, "bfloat16"),
    ),
    16,
)
"""Every kind but states."""
INDEXED = KVSpec(
    "test/indexed",
    "tokenizer",
    (
        LayerClass("latent", (0, 1), 1, 12, 0, "bfloat16"),
        LayerClass("full", (0, 1), 1, 6, 0, "float16", role="indexer"),
    ),
    16,
)
"""Several classes, all of whose groups are needed."""
WINDOWS = KVSpec("test/windows", "tokenizer", (LayerClass("window", (0, 1), 2, 8, 8, "float16", window=40),), 16)
"""One class, of which not all groups are needed."""
HYBRID = KVSpec(
    "test/hybrid",
    "tokenizer",
    (
        LayerClass("full", (0,), 2, 8, 8, "float16"),
        LayerClass("window", (1, 2), 2, 8, 4, "float16", window=40),
        LayerClass("state", (3,), 2, 6, 5, "float16"),
    ),
    16,
)
"""With a state, of which there is a snapshot at the end alone."""
TRACKS = ("FP16", "BF16", "Int8")
CONTINUATION = (3, 1, 4, 1, 5)


def numbers(spec: KVSpec, tokens: list[int]) -> tuple[torch.Tensor, ...]:
    """Return a made-up cache of some tokens: a tensor per class. Its numbers depend on each token alone.

    The numbers of a state depend on the number of tokens.
    """
    parts = []
    for number, part in enumerate(spec.parts):
        layers, halves, heads, _, dim = part.shape(1)
        places = torch.arange(math.prod((layers, halves, heads, dim))).view(layers, halves, heads, 1, dim)
        ids = torch.tensor(tokens)
        if part.only.kind == "state":
            ids = torch.arange(part.rows) + len(tokens)
        ids = ids.view(1, 1, 1, -1, 1)
        parts.append(((places * 31 + ids * 7919 + number * 13) % 255 - 127).float())
    return tuple(parts)


def published(root, spec: KVSpec, tokens: list[int]) -> PublishedAssets:
    """Publish the made-up cache of some tokens in a folder."""
    chunks = chain(tokens, model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens)
    with open_store(root / spec.model.rpartition("/")[2]).writer() as writer:
        frames = FrameEncoder(spec, chunks, len(tokens), TRACKS, None, writer)
        cache = list(numbers(spec, tokens))
        for number, part in enumerate(spec.parts):
            if ends := snapshot_ends(part, len(tokens)):
                cache[number] = torch.cat([numbers(spec, tokens[:end])[number] for end in ends], dim=3)
        frames.encode(cache)
        seconds = {track: frames.decode_seconds(track) for track in TRACKS}
        expected = {"FP16": 1e-6, "BF16": 2e-6, "Int8": 0.001}
        losses = {track: [loss] * len(frames.units) for track, loss in expected.items()}
        writer.prompt(Prompt(tuple(tokens), CONTINUATION))
        writer.commit(frames.catalog(losses, seconds, loss_method="made up", source="test"))
    return PublishedAssets(root)


def link(library: PublishedAssets, rate: float = 1e6, **options) -> MemoryConnection:
    """Connect to a library over a link of ``rate`` bytes per second."""
    return MemoryConnection(partial(library.find, EVERYTHING), MemoryLink(rate, 0.02), **options)


class Computer:
    """An engine of such a model: it computes the made-up numbers, and checks the cache that it continues."""

    mode = "suffix"

    def __init__(self, spec: KVSpec, fails: int = 0) -> None:
        self.spec, self.calls, self._fails = spec, [], fails

    def prefill(self, tokens, before=None):
        return self.prefill_classes(tokens, None if before is None else (before,))[0]

    def prefill_classes(self, tokens, before=None):
        """As `ClassEngine`; the tokens of these tests count up from 0."""
        self.calls.append((tokens[0], len(tokens)))
        if len(self.calls) <= self._fails:
            raise RuntimeError("out of memory")
        if before is not None:
            exact = numbers(self.spec, list(range(tokens[0])))
            for kv, whole, only in zip(before, exact, self.spec.classes, strict=True):
                seen = only.first_needed(tokens[0])
                assert kv.shape == whole.shape
                assert (kv[:, :, :, seen:].float() - whole[:, :, :, seen:]).abs().max() <= 1.5
        return numbers(self.spec, list(tokens))

    def score(self, kv, tokens):
        return self.score_classes(None if kv is None else (kv,), tokens)

    def score_classes(self, kv, tokens):
        """As `ScoringClassEngine`: the next token depends on every visible number, and only on these."""
        state = torch.zeros(16, dtype=torch.float64)
        for part, only in zip(kv, self.spec.classes, strict=True):
            seen = part[:, :, :, only.first_needed(part.shape[3]) :].double().flatten()
            state += torch.stack(
                [(seen * torch.cos(seen.new_tensor(range(len(seen))) * word)).mean() for word in range(16)]
            )
        return torch.log_softmax(torch.stack([state / 10 + token / 10 * torch.arange(16) for token in tokens]), dim=-1)
