"""An asset on disk, read: a folder whose every file is checked against the catalog before it is believed.

The folder::

    catalog.json                    what the asset offers (`kvabr.catalog`)
    profile.safetensors             side information of the model, if a track needs it
    groups/<track>/<group>.kvg      one frame per group and track; the group in five digits
    prompt.json                     token ids of prompt and continuation: for recompute and verification, never served
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvabr.types.catalog import Catalog
from kvabr.types.errors import AssetError, ForeignError, FormatError
from kvabr.types.naming import chain, check_track_name

if TYPE_CHECKING:
    from kvabr.codec.profile import Profile

CATALOG = "catalog.json"
PROFILE = "profile.safetensors"
PROMPT = "prompt.json"
GROUPS = "groups"

_PROMPT_SCHEMA = "kvabr.prompt/1"
_MAX_PROMPT_BYTES = 64 << 20
_MAX_PROFILE_BYTES = 1 << 30
_AGAIN = "encode the asset again"


def frame_path(root: Path, group: int, track: str) -> Path:
    """Where the frame of a group on a track lies. The name of the track is checked: it cannot lead out of ``root``."""
    return root / GROUPS / check_track_name(track) / f"{group:05d}.kvg"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What an asset was made from, as token ids."""

    tokens: tuple[int, ...]
    """The prompt, whose cache the asset is."""
    continuation: tuple[int, ...]
    """What really followed: the loss of a cache is measured on it."""
    seal: str | None = None
    """Of a salted prompt, see `sealed`."""

    def sealed(self, name: str) -> Prompt:
        """The same, tied to a prompt digest that nobody can compute from the token ids without the salt.

        Args:
            name: the last chained digest, which names the asset.
        """
        return replace(self, seal=self._seal(name))

    def is_sealed_for(self, name: str) -> bool:
        """Whether `sealed` made it for that digest, of these very token ids."""
        return self.seal == self._seal(name)

    def _seal(self, name: str) -> str:
        parts = [name.encode()] + [struct.pack(f"<{len(ids)}I", *ids) for ids in (self.tokens, self.continuation)]
        return hashlib.sha256(
            b"kvabr.seal/1\0" + b"".join(struct.pack("<Q", len(part)) + part for part in parts)
        ).hexdigest()

    def dumps(self) -> str:
        """The prompt as JSON text."""
        value = {"schema": _PROMPT_SCHEMA, "tokens": list(self.tokens), "continuation": list(self.continuation)}
        return json.dumps(value if self.seal is None else {**value, "seal": self.seal})

    @classmethod
    def loads(cls, text: str | bytes) -> Prompt:
        """Read `dumps` back.

        Raises:
            FormatError: not such JSON, another version, or ids that are not token ids.
        """
        try:
            value = json.loads(text)
            if not isinstance(value, dict) or value.get("schema") != _PROMPT_SCHEMA:
                raise FormatError(f"prompt: not {_PROMPT_SCHEMA!r}; written by another version of kvabr?")
            seal = value.get("seal")
            return cls(_ids(value["tokens"]), _ids(value["continuation"]), None if seal is None else str(seal))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise FormatError(f"prompt: not a prompt of token ids ({error!r})") from error


@dataclass(frozen=True, slots=True)
class Asset:
    """A published cache in a folder."""

    path: Path
    catalog: Catalog

    @classmethod
    def open(cls, path: Path) -> Asset:
        """Open the asset in the folder ``path``; only the catalog is read.

        Raises:
            AssetError: there is none.
            FormatError: its catalog is damaged, or of a newer version.
        """
        if not path.is_dir():
            raise AssetError(f"{path}: no such asset; make one with: kvabr encode --text FILE --tokens N --out {path}")
        return cls(path, Catalog.read(path / CATALOG))

    def profile_bytes(self) -> bytes | None:
        """The codec profile's file, checked against the catalog; None if no track needs one.

        Raises:
            AssetError: the file is missing.
            FormatError: it is not the one that the catalog names.
        """
        expected = self.catalog.profile
        if expected is None:
            return None
        path = self.path / PROFILE
        if self.catalog.profile_bytes > _MAX_PROFILE_BYTES:
            raise FormatError(f"{path}: a profile of {self.catalog.profile_bytes} bytes is more than any model needs")
        data = _read(path, self.catalog.profile_bytes)
        if hashlib.sha256(data).hexdigest() != expected:
            raise FormatError(f"{path}: not the profile that the catalog names (SHA-256 differs); {_AGAIN}")
        return data

    def profile(self) -> Profile | None:
        """The codec profile, ready for an assembler; None if no track needs one.

        Raises:
            AssetError, FormatError: as `profile_bytes`.
            ForeignError: it is of another model.
        """
        from kvabr.codec.profile import Profile  # noqa: PLC0415 - reading a catalog must not load torch

        data = self.profile_bytes()
        if data is None:
            return None
        profile = Profile.from_bytes(data)
        profile.check(self.catalog.spec)
        return profile

    def frame(self, group: int, track: str) -> bytes:
        """The frame of one group on one track, checked against the catalog.

        Raises:
            AssetError: the file is missing.
            FormatError: it is truncated, too long, or damaged; or there is no such track.
            ForeignError: it is the frame of another group or track of this asset.
            IndexError: there is no such group.
        """
        offer = self.catalog.track(track)
        if not 0 <= group < self.catalog.groups:
            raise IndexError(f"group {group} is outside an asset of {self.catalog.groups} groups")
        path = frame_path(self.path, group, track)
        try:
            data = _read(path, offer.bytes[group])
        except FormatError:
            # A frame of another group has another size more often than not: say what it is before what it is not.
            self._refuse_swapped(path, group, track)
            raise
        if hashlib.sha256(data).hexdigest() != offer.digests[group]:
            self._refuse_swapped(path, group, track)
            raise FormatError(f"{path}: damaged, its SHA-256 is not the one in the catalog; {_AGAIN}")
        return data

    def prompt(self) -> Prompt:
        """Token ids of the prompt and of what followed it.

        Raises:
            AssetError: the file is missing, as in an asset that was fetched.
            FormatError: it is damaged, or not the prompt of this catalog.
        """
        path = self.path / PROMPT
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_PROMPT_BYTES + 1)
        except OSError as error:
            raise AssetError(f"{path}: cannot be read ({error.strerror}); only a publisher's asset has it") from error
        if len(data) > _MAX_PROMPT_BYTES:
            raise FormatError(f"{path}: larger than a prompt may be ({_MAX_PROMPT_BYTES} bytes)")
        try:
            prompt = Prompt.loads(data)
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from error
        if not self._is_ours(prompt):
            raise FormatError(f"{path}: not the prompt that the catalog's digests name; {_AGAIN}")
        return prompt

    def _is_ours(self, prompt: Prompt) -> bool:
        spec, tokens = self.catalog.spec, prompt.tokens
        if len(tokens) != self.catalog.tokens:
            return False
        if prompt.seal is not None:
            # The digests are salted, and the salt is not kept here.
            return prompt.is_sealed_for(self.catalog.namespace.prompt)
        digests = chain(tokens, model=spec.model, tokenizer=spec.tokenizer, group_tokens=spec.group_tokens)
        return tuple(digests) == self.catalog.chunks

    def _refuse_swapped(self, path: Path, group: int, track: str) -> None:
        """Raise if the file is a good frame of another place in this asset."""
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            return
        for other in self.catalog.tracks:
            if digest in other.digests:
                place = other.digests.index(digest)
                raise ForeignError(
                    f"{path}: this is group {place} of {other.name}, not group {group} of {track}; files were swapped, "
                    f"{_AGAIN}"
                )


def _read(path: Path, size: int) -> bytes:
    """Read a file that must have exactly ``size`` bytes; never more than that plus one."""
    try:
        with path.open("rb") as file:
            data = file.read(size + 1)
    except FileNotFoundError as error:
        raise AssetError(f"{path}: missing from the asset; {_AGAIN}, or copy the whole folder") from error
    except OSError as error:
        raise AssetError(f"{path}: cannot be read ({error.strerror})") from error
    if len(data) < size:
        raise FormatError(f"{path}: truncated, {len(data)} of {size} bytes; {_AGAIN}, or copy it again")
    if len(data) > size:
        raise FormatError(f"{path}: longer than the {size} bytes that the catalog says; {_AGAIN}")
    return data


def _ids(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < 1 << 32 for token in value):
        raise FormatError("prompt: token ids must be a list of whole numbers from 0 to 2**32 - 1")
    return tuple(value)
