"""Digests of groups on every track: run as a process, with a file of `Case` and one to write them to."""

import hashlib
import json
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from kvabr.codec.base import GroupContext, codec, names
from kvabr.codec.profile import Profile
from kvabr.codec.quantiser import below
from kvabr.types.kv import KVSpec


@dataclass(frozen=True)
class Case:
    name: str
    spec: KVSpec
    group: torch.Tensor
    first_token: int
    profile: bytes | None


def digests(case: Case) -> dict[str, str]:
    """Encode a group on every track that it has."""
    profile = None if case.profile is None else Profile.from_bytes(case.profile)
    context = GroupContext(case.spec, case.first_token, case.group.shape[3], profile, memo={})
    payloads: dict[str, bytes] = {}
    for track in names():
        if profile is None and codec(track).needs_profile:
            continue
        chain: list[str] = []
        lower = below(track)
        while lower is not None:
            chain.insert(0, lower)
            lower = below(lower)
        payloads[track] = codec(track).encode(case.group, context, [payloads[each] for each in chain])
    return {f"{case.name} {track}": hashlib.sha256(payload).hexdigest() for track, payload in payloads.items()}


if __name__ == "__main__":
    given, out = map(Path, sys.argv[1:])
    made: dict[str, str] = {}
    for each in pickle.loads(given.read_bytes()):  # noqa: S301  # the test that starts this wrote it
        made |= digests(each)
    out.write_text(json.dumps(made), encoding="utf-8")
