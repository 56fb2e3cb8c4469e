"""The codec profiles that ship with the package, found by their digest or by the shape of a model's cache."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from kvabr.types.kv import KVSpec, LayerClass

_LENGTH = 8
"""Bytes that say how long the header of a safetensors file is; the header is padded to a multiple of as many."""
_MOST_NAMES = 8 << 10
"""By how many bytes the names of two models can differ in a file, with room for escapes."""


@dataclass(frozen=True, slots=True)
class ShippedProfile:
    """A codec profile in this folder. Its file is read when it is needed, not before."""

    title: str
    """The model that it was made from."""
    file: str
    sha256: str
    """Of the file, hex: the name of the profile where it is of exactly this model."""
    size: int
    """Bytes of the file."""

    @property
    def spec(self) -> KVSpec:
        """The spec in the file, of which only the header is read, once."""
        return _spec(self.file)

    def read(self) -> bytes:
        """Return the file."""
        return _path(self.file).read_bytes()

    def fits(self, spec: KVSpec) -> bool:
        """Return whether a cache has this profile's shape: equal layer classes, with the same rotary embeddings.

        The names of model and tokenizer and the element type do not count: a folder's name is up to its owner, a
        profile codes numbers, and a model that was tuned further still has nearly the statistics of the original. For
        other weights of the same shape it works too, but caches become larger and lose more.
        """
        return spec.part_of is None and _shape(spec) == _shape(self.spec)

    def bound(self, spec: KVSpec) -> bytes:
        """Return the profile as a file for a model that it fits, under that model's names and element types.

        Nothing else in it changes, and everybody makes the same bytes of the same spec. So a player that has the
        package has the bound profile as well, without a network.
        """
        return rebound(self.read(), self.spec, spec)


def rebound(data: bytes, theirs: KVSpec, spec: KVSpec) -> bytes:
    """Return a profile's file for a model of the same shape under other names, see `ShippedProfile.bound`."""
    pairs = zip(theirs.classes, spec.classes, strict=True)
    classes = tuple(replace(own, dtype=wanted.dtype) for own, wanted in pairs)
    renamed = replace(theirs, model=spec.model, tokenizer=spec.tokenizer, classes=classes)
    if renamed == theirs:
        return data
    end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    header = json.loads(data[_LENGTH:end])
    facts = json.loads(header["__metadata__"]["kvabr"])
    header["__metadata__"] = {"kvabr": json.dumps(facts | {"spec": renamed.to_json()}, sort_keys=True)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH)
    return len(text).to_bytes(_LENGTH, "little") + text + data[end:]


SMOLLM2 = ShippedProfile(
    "SmolLM2-135M-Instruct",
    "smollm2.profile.safetensors",
    "a3de69c1dcf3656db8fa08fdeaa6ffae7cd4baa11417538c91bb1bce276780f7",
    7_952_206,
)
"""Made as by `kvabr calibrate --gain --step-scale 1.15`, from 55 contexts of 1,024 tokens: English manual pages (18),
Python's manual (12), answers sampled from the model (12), made-up records (5), and manual pages in Spanish, Russian,
Chinese (2 each), Polish and Portuguese (1 each). Gains are those of 7 of them. The threshold for tokens that are stored
separately was set afterwards, to what half a per cent of a part of these exceed. It saw no source code, licences,
stories or chat, and of the languages of `tools/fetch-texts` only Russian and Chinese."""


GEMMA3_270M = ShippedProfile(
    "Gemma 3 270M",
    "gemma3-270m.profile.safetensors",
    "8a891ea3734c6e6d661c9ea92eaba2ed6c945cbb61cc21c0dc80cf685de4bfa7",
    7_388_620,
)
"""Made of Gemma 3 270M with 4-bit weights (`tools/gemma-model`) as by `kvabr calibrate --kept 96 96 --target-kl 0.12
--target-track AC-L0`, from 29 contexts of 640 tokens that begin with <bos>: English manual pages (10), Python's manual
(5), READMEs (3), made-up records (2), and manual pages in Chinese (2), German, Italian, Japanese, Polish, Portuguese,
Russian and Spanish (1 each). Four of them chose the steps. Then it was bound to the name google/gemma-3-270m and to
bfloat16. It saw no source code, licences, stories or chat.

It contains statistics of caches of Gemma 3 270M (means, transforms, probability tables) and digests of texts, but no
weights and no text. Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms;
read them before you use or pass on what is derived from the model."""


def shipped_profiles() -> tuple[ShippedProfile, ...]:
    """Return all profiles that ship with the package, without reading their files."""
    return (SMOLLM2, GEMMA3_270M)


def shipped_profile(spec: KVSpec) -> ShippedProfile | None:
    """Return the profile that fits a model's caches, see `ShippedProfile.fits`; None if there is none."""
    return next((each for each in shipped_profiles() if each.fits(spec)), None)


def shipped_bytes(sha256: str, size: int, spec: KVSpec) -> bytes | None:
    """Return the profile that is wanted, as its file was or bound to a model; None if the package has no such bytes.

    Args:
        sha256: its digest, hex.
        size: bytes of its file.
        spec: the model that it is said to be of.
    """
    for each in shipped_profiles():
        if each.sha256 == sha256:
            return each.read()
    fitting = shipped_profile(spec)
    # Binding changes names only, so a file of quite another size need not be read and hashed.
    if fitting is None or abs(size - fitting.size) > _MOST_NAMES:
        return None
    data = fitting.bound(spec)
    return data if len(data) == size and hashlib.sha256(data).hexdigest() == sha256 else None


def _shape(spec: KVSpec) -> list[LayerClass]:
    """Return the layer classes, without what a profile does not depend on."""
    kept = ((each, each.scales is not None) for each in spec.classes)
    return [each if own else replace(each, dtype="float16", interval=None) for each, own in kept]


def _path(file: str) -> Traversable:
    return files(__package__).joinpath(file)


@lru_cache
def _spec(file: str) -> KVSpec:
    with _path(file).open("rb") as stream:
        header: dict[str, Any] = json.loads(stream.read(int.from_bytes(stream.read(_LENGTH), "little")))
    return KVSpec.from_json(json.loads(header["__metadata__"]["kvabr"])["spec"])
