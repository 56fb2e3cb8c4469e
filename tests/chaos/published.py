"""The assets that the laboratory publishes, and their true contents.

Each prompt has several versions: the same tokens, another cache. The truth is computed from the frames of a version,
without a network, a player or an assembler: every group of every track, decoded by itself.
"""

import random
import shutil
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from kvabr.codec.base import GroupContext, codec
from kvabr.codec.group import decode_group, payload_of
from kvabr.codec.profile import Profile
from kvabr.publish.encoder import own_profile
from kvabr.publish.frames import FrameEncoder
from kvabr.store.locations import open_asset, open_store
from kvabr.store.prompt import Prompt as PromptFile
from kvabr.types.engine import EngineMode
from kvabr.types.naming import TrackNamespace, chain
from tests import kvdata
from tests.chaos.facts import digest_of

SPEC = kvdata.spec(layers=2, heads=4, dim=64, group_tokens=32)
"""A full group has more than 64 KiB at FP16: an origin sends it from an open file. It loads the others."""
G = SPEC.group_tokens
LAYERS = ("AC-L0", "AC-L1", "AC-L2", "AC-L3")
KINDS = (
    (192, ("FP16", "Int8", "Int4", "AC-5x", *LAYERS)),
    (170, ("FP16", "Int8", "Int4")),
    (128, ("AC-5x", *LAYERS)),
    (96, ("Int8", "AC-L0", "AC-L1")),
)
"""Tokens and tracks of the prompts' assets. One ends in a short group."""
BEHIND = 40
"""Tokens of a prompt that no asset covers."""
LOSS = {
    "FP16": 1e-7, "Int8": 3e-5, "Int4": 7e-3, "AC-5x": 8e-3, "AC-L0": 9e-2, "AC-L1": 2e-2, "AC-L2": 4e-3, "AC-L3": 4e-4,
}  # fmt: skip
"""Of a whole cache."""

Truth = dict[tuple[int, int, str, int], str]
"""SHA-256 of a group's numbers, by prompt, version, track and group."""


@dataclass(frozen=True)
class Prompt:
    """One prompt: its tokens, and the cache that an engine computes for them."""

    number: int
    asset_tokens: int
    tracks: tuple[str, ...]
    versions: tuple[Path, ...]
    """Stores with one asset each, which are never served themselves."""

    def __reduce__(self):
        # Without what is cached: other processes compute it themselves.
        return Prompt, (self.number, self.asset_tokens, self.tracks, self.versions)

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        dice = random.Random(f"prompt {self.number}")
        return tuple(dice.randrange(1000) for _ in range(self.asset_tokens + BEHIND))

    @cached_property
    def exact(self) -> torch.Tensor:
        """The computed cache: version 0 before it was encoded, in the model's dtype."""
        return _cache(self.number, 0, len(self.tokens)).to(SPEC.torch_dtype)

    @cached_property
    def namespace(self) -> TrackNamespace:
        tokens = self.tokens[: self.asset_tokens]
        return TrackNamespace(SPEC.model, _chunks(tokens)[-1])

    @property
    def name(self) -> str:
        """The folder of the store that it is served from."""
        return f"prompt-{self.number}"


@dataclass
class Library:
    prompts: tuple[Prompt, ...]
    profile: Path
    """The codec profile of all of them."""
    truth: Truth = field(default_factory=dict)
    catalogs: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Prompt and version by the SHA-256 of the catalog."""

    def recomputed(self, prompt: int, first: int, last: int) -> str:
        """SHA-256 of tokens ``first`` to ``last`` - 1 as the engine computes them."""
        return digest_of(self.prompts[prompt].exact[:, :, :, first:last])


def build(folder: Path, *, prompts: int = len(KINDS), versions: int = 2) -> Library:
    """Publish everything into a folder, and compute the truth."""
    profile = own_profile(SPEC, (_cache(0, 0, KINDS[0][0]),))
    file = folder / "profile.safetensors"
    file.write_bytes(profile.to_bytes())
    made = []
    for number, (tokens, tracks) in enumerate(KINDS[:prompts]):
        paths = tuple(folder / f"{number}-{version}" for version in range(versions))
        prompt = Prompt(number, tokens, tracks, paths)
        for version, path in enumerate(paths):
            _publish(prompt, version, path, profile)
        made.append(prompt)
    library = Library(tuple(made), file)
    for prompt in made:
        for version, path in enumerate(prompt.versions):
            library.truth.update(_decoded(prompt.number, version, path))
            library.catalogs[open_asset(path).catalog_sha256] = prompt.number, version
    return library


def place(prompt: Prompt, version: int, root: Path) -> None:
    """Publish a version below a root, in place of another if there is one, as a publisher does."""
    asset = open_asset(prompt.versions[version])
    with open_store(root / prompt.name).writer(force=True) as writer:
        writer.begin(asset.catalog.spec)
        for track in asset.catalog.tracks:
            for group, digest in enumerate(track.digests):
                writer.frame(group, track.name, asset.frame(group, track.name), digest)
        writer.profile(asset.profile_bytes() or b"")
        writer.commit(asset.catalog)


def remove(prompt: Prompt, root: Path) -> None:
    shutil.rmtree(root / prompt.name, ignore_errors=True)


def _publish(prompt: Prompt, version: int, path: Path, profile: Profile) -> None:
    tokens = prompt.tokens[: prompt.asset_tokens]
    with open_store(path).writer() as writer:
        frames = FrameEncoder(SPEC, _chunks(tokens), len(tokens), prompt.tracks, profile, writer)
        frames.encode((_cache(prompt.number, version, len(tokens)),))
        groups = SPEC.groups(len(tokens))
        loss = {track: [LOSS[track] / groups] * groups for track in prompt.tracks}
        catalog = frames.catalog(loss, dict.fromkeys(prompt.tracks, 1e-3), loss_method="none", source=path.name)
        writer.prompt(PromptFile(tokens, (1, 2)))
        writer.commit(catalog)


def _cache(prompt: int, version: int, tokens: int) -> torch.Tensor:
    """The first tokens of a cache: the longer one begins as the shorter one does."""
    longest = max(count for count, _ in KINDS) + BEHIND
    return kvdata.related(SPEC, longest, 100 * prompt + version)[:, :, :, :tokens]


def _chunks(tokens: tuple[int, ...]) -> list[str]:
    return chain(tokens, model=SPEC.model, tokenizer=SPEC.tokenizer, group_tokens=G)


def _decoded(prompt: int, version: int, path: Path) -> Truth:
    """Decode all that is in a store."""
    asset = open_asset(path)
    catalog, data = asset.catalog, asset.profile_bytes()
    profile = None if data is None else Profile.from_bytes(data)
    truth: Truth = {}
    for track in catalog.tracks:
        for group, chunk in enumerate(catalog.chunks):
            first, last = SPEC.group_range(group, catalog.tokens)
            below, name = [], codec(track.name).refines
            while name is not None:
                below.insert(0, payload_of(asset.frame(group, name)))
                name = codec(name).refines
            out = torch.full(SPEC.shape(last - first), float("nan"), dtype=SPEC.torch_dtype)
            context = GroupContext(SPEC, first, last - first, profile)
            decode_group(asset.frame(group, track.name), track.name, context, chunk, group, out, below)
            assert not torch.isnan(out).any()
            truth[prompt, version, track.name, group] = digest_of(out)
    return truth


class KnownEngine:
    """Computes a prompt's cache by looking it up, in a part of the time that its cost predicts."""

    spec = SPEC

    def __init__(self, prompt: Prompt, seconds: float, mode: EngineMode, *, fails: bool = False) -> None:
        self._prompt, self._seconds, self.mode, self._fails = prompt, seconds, mode, fails
        self.bases: list[torch.Tensor] = []
        """Copies of what it was given to compute on, at the beginning."""
        self.ends: list[torch.Tensor] = []
        """The same at the end: a better group may have been written meanwhile."""
        self.misled = False
        """Whether it was asked for other tokens than those of the prompt."""

    def prefill(self, tokens, before=None):
        first = 0 if before is None else int(before.shape[3])
        if before is not None:
            self.bases.append(before.clone())
        self.misled |= tuple(tokens) != self._prompt.tokens[first : first + len(tokens)]
        time.sleep(self._seconds * len(tokens) / len(self._prompt.tokens))
        if before is not None:
            self.ends.append(before.clone())
        if self._fails:
            raise RuntimeError("the engine is out of memory")
        return self._prompt.exact[:, :, :, first : first + len(tokens)].clone()
