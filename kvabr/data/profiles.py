"""The codec profiles shipped with the package, by digest or by the shape of a model's cache."""

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
"""Bytes of a safetensors file's header length; the header is padded to a multiple of it."""
_MAX_NAMES = 8 << 10
"""Maximum difference in size from the names of two models, with escapes."""


@dataclass(frozen=True, slots=True)
class ShippedProfile:
    """A codec profile in this folder, read on demand."""

    title: str
    """Model that it was made from."""
    file: str
    sha256: str
    """Of the file, hex; the name of the profile for this very model."""
    size: int
    """Bytes of the file."""

    @property
    def spec(self) -> KVSpec:
        """The spec in the file's header."""
        return _spec(self.file)

    def read(self) -> bytes:
        """Return the file."""
        return _path(self.file).read_bytes()

    def fits(self, spec: KVSpec) -> bool:
        """Return True if a cache has this profile's layer classes and rotary embeddings.

        Names and the element type do not matter. A fine-tuned model has nearly the statistics of the original; for
        other weights of the same shape, caches become larger and lose more.
        """
        return spec.part_of is None and _shape(spec) == _shape(self.spec)

    def bound(self, spec: KVSpec) -> bytes:
        """Return the profile as a file for a model that it fits, with that model's names and element types.

        The bytes depend on the spec only, so a player with the package needs no network for them.
        """
        return rebound(self.read(), self.spec, spec)


def rebound(data: bytes, theirs: KVSpec, spec: KVSpec) -> bytes:
    """Return a profile's file under other names, see `ShippedProfile.bound`."""
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
Chinese (2 each), Polish and Portuguese (1 each). Seven of them chose the gains. The threshold for tokens stored
separately was then set to exclude half a per cent of a part of these. Not included: source code, licences, stories,
chat, and the languages of `tools/fetch-texts` except Russian and Chinese.
"""


GEMMA3_270M = ShippedProfile(
    "Gemma 3 270M",
    "gemma3-270m.profile.safetensors",
    "8a891ea3734c6e6d661c9ea92eaba2ed6c945cbb61cc21c0dc80cf685de4bfa7",
    7_388_620,
)
"""Made of Gemma 3 270M with 4-bit weights (`tools/gemma-model`) as by `kvabr calibrate --kept 96 96 --target-kl 0.12
--target-track AC-L0`, from 29 contexts of 640 tokens that begin with <bos>: English manual pages (10), Python's manual
(5), READMEs (3), made-up records (2), and manual pages in Chinese (2), German, Italian, Japanese, Polish, Portuguese,
Russian and Spanish (1 each). Four of them chose the steps. It was then bound to google/gemma-3-270m and bfloat16. Not
included: source code, licences, stories, chat.

It contains statistics of caches of Gemma 3 270M (means, transforms, probability tables) and digests of texts, but no
weights and no text. Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms;
read them before you use or pass on what is derived from the model.
"""


def shipped_profiles() -> tuple[ShippedProfile, ...]:
    """Return all shipped profiles, without reading their files."""
    return (SMOLLM2, GEMMA3_270M)


def shipped_profile(spec: KVSpec) -> ShippedProfile | None:
    """Return the profile that fits a model's caches, if any."""
    return next((each for each in shipped_profiles() if each.fits(spec)), None)


def shipped_bytes(sha256: str, size: int, spec: KVSpec) -> bytes | None:
    """Return the profile with a digest (hex) and size, as shipped or bound to the model ``spec``; None without one."""
    for each in shipped_profiles():
        if each.sha256 == sha256:
            return each.read()
    fitting = shipped_profile(spec)
    # Binding changes names only, so other sizes need not be read.
    if fitting is None or abs(size - fitting.size) > _MAX_NAMES:
        return None
    data = fitting.bound(spec)
    return data if len(data) == size and hashlib.sha256(data).hexdigest() == sha256 else None


def _shape(spec: KVSpec) -> list[LayerClass]:
    """Return the layer classes without details that profiles ignore."""
    kept = ((each, each.scales is not None) for each in spec.classes)
    return [each if own else replace(each, dtype="float16", interval=None) for each, own in kept]


def _path(file: str) -> Traversable:
    return files(__package__).joinpath(file)


@lru_cache
def _spec(file: str) -> KVSpec:
    with _path(file).open("rb") as stream:
        header: dict[str, Any] = json.loads(stream.read(int.from_bytes(stream.read(_LENGTH), "little")))
    return KVSpec.from_json(json.loads(header["__metadata__"]["kvabr"])["spec"])
