"""A model of a few hundred numbers that obeys the engine protocol: what a token's KV is depends on all before it."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvabr.codec.rope import rotate
from kvabr.publish.encoder import PassageBase, publish
from kvabr.store.asset import Asset
from kvabr.store.locations import open_asset, open_store
from kvabr.store.prompt import Prompt
from kvabr.types.catalog import Catalog
from kvabr.types.cost import PrefillCost
from kvabr.types.digests import SHA256
from kvabr.types.kv import KVSpec
from kvabr.types.passage import PassageNotes
from tests import kvdata

SPEC = kvdata.spec(group_tokens=16)
VOCABULARY = 97


class ToyModel:
    """Attention over the keys and values before a token, a fixed random embedding and head; deterministic."""

    mode = "hole"

    def __init__(self, spec: KVSpec = SPEC) -> None:
        dice = torch.Generator().manual_seed(5)
        self.spec = spec
        width = spec.elements_per_token
        self._embed = torch.randn(VOCABULARY, width, generator=dice)
        self._head = torch.randn(width, VOCABULARY, generator=dice) / width**0.5
        self.prefilled = 0

    def prefill(self, tokens: Sequence[int], before: torch.Tensor | None = None) -> torch.Tensor:
        self.prefilled += len(tokens)
        state, start = self._beside(before, len(tokens))
        for place, token in enumerate(tokens, start):
            own = self._embed[token]
            state[place] = own + 0.5 * self._attend(own, state[:place])
        spec = self.spec
        new = state[start:].reshape(len(tokens), spec.layers, 2, spec.kv_heads, spec.head_dim)
        return new.permute(1, 2, 3, 0, 4).clone()

    def score(self, kv: torch.Tensor | None, tokens: Sequence[int]) -> torch.Tensor:
        state, start = self._beside(kv, len(tokens))
        rows = []
        for place, token in enumerate(tokens, start):
            own = self._embed[token]
            state[place] = own + 0.5 * self._attend(own, state[:place])
            rows.append((state[place] + self._attend(state[place], state[: place + 1])) @ self._head)
        return torch.log_softmax(torch.stack(rows).double(), dim=-1)

    def _beside(self, kv: torch.Tensor | None, more: int) -> tuple[torch.Tensor, int]:
        """Return what is there, [token, number], with room for more, and where that begins."""
        held = self._flat(kv)
        return torch.cat([held, held.new_empty(more, held.shape[1])]), len(held)

    def _flat(self, kv: torch.Tensor | None) -> torch.Tensor:
        if kv is None:
            return torch.zeros(0, self.spec.elements_per_token)
        return kv.float().permute(3, 0, 1, 2, 4).reshape(kv.shape[3], self.spec.elements_per_token)

    def _attend(self, query: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        if not len(state):
            return torch.zeros_like(query)
        weights = torch.softmax(state @ query / len(query) ** 0.5, dim=0)
        return weights @ state


class ToyBlendModel(ToyModel):
    """A toy model that can compute any tokens of a cache again."""

    def recompute(self, tokens, at, kv, *, layers=None):
        spec, state = self.spec, self._flat(kv)
        state = torch.cat([state, torch.zeros(max(0, at[-1] + 1 - len(state)), state.shape[1])])
        for place in at:
            own = self._embed[tokens[place]]
            state[place] = own + 0.5 * self._attend(own, state[:place])
        self.prefilled += len(at)
        new = state[list(at)].reshape(len(at), spec.layers, 2, spec.kv_heads, spec.head_dim)
        return new.permute(1, 2, 3, 0, 4)[:layers].clone()

    def attention(self, question, kv, *, layers=None, reduce="sum"):
        state = self._flat(kv)
        weights = torch.softmax(self._embed[list(question)] @ state.T / state.shape[1] ** 0.5, dim=1)
        row = weights.sum(dim=0) if reduce == "sum" else weights.amax(dim=0)
        return row[None].expand(len(range(self.spec.layers) if layers is None else layers), -1).clone()


def prompt(tokens: int = 70, continuation: int = 12) -> Prompt:
    dice = torch.Generator().manual_seed(3)
    ids = [int(token) for token in torch.randint(VOCABULARY, (tokens + continuation,), generator=dice)]
    return Prompt(tuple(ids[:tokens]), tuple(ids[tokens:]))


def steady(catalog: Catalog) -> Catalog:
    """Return a catalog with times that no machine measured: plays of it are the same on a fast one and a busy one."""
    tracks = tuple(replace(track, decode_s=2e-4) for track in catalog.tracks)
    prefill = PrefillCost(2e-4, 3e-5, 2e-7) if catalog.tokens >= 128 else None
    return replace(catalog, tracks=tracks, prefill=prefill)


def toy_asset(
    path,
    tracks=("FP16", "Int8", "Int4"),
    *,
    profile=None,
    tokens: int = 70,
    force: bool = False,
    salt: bytes = b"",
    digest: str = SHA256,
) -> Asset:
    """Encode the toy model's cache into a folder: 5 groups of 16 tokens, the last one short."""
    made = prompt(tokens)
    with open_store(path).writer(force=force) as writer:
        how = {"salt": salt, "digest": digest, "time_engine": False}
        catalog = steady(publish(ToyModel(), made, tracks, profile, writer, **how))
        writer.prompt(made.sealed(catalog.namespace.prompt) if salt else made)
        writer.commit(catalog)
    return open_asset(path)


def toy_base(
    ids: Sequence[int],
    model: ToyModel | None = None,
    *,
    fusion: tuple[tuple[float, float], ...] = ((0.0, 0.05),),
    order: bytes = b"",
) -> PassageBase:
    """What a publisher has of a passage: the mean of its caches behind two contexts."""
    model = model or ToyModel()
    caches = []
    for context in ([1, 2, 3], [5, 6, 7, 8]):
        kv = model.prefill([*context, *ids])[:, :, :, len(context) :]
        kv[:, 0] = rotate(kv[:, 0], model.spec.rope, len(context), undo=True)
        caches.append(kv)
    return PassageBase(sum(caches) / 2, PassageNotes("mean", 2, order, fusion), model.prefill([1, 2, 3]))


def toy_passage(
    path,
    ids: Sequence[int],
    tracks=("FP16", "Int8", "Int4"),
    *,
    profile=None,
    salt: bytes = b"",
    **notes,
) -> Asset:
    """Publish a passage of the toy model into a folder."""
    made = Prompt(tuple(ids), prompt().continuation)
    with open_store(path).writer() as writer:
        base = toy_base(ids, **notes)
        how = {"passage": base, "salt": salt, "time_engine": False}
        catalog = steady(publish(ToyModel(), made, tracks, profile, writer, **how))
        writer.commit(catalog)
    return open_asset(path)
