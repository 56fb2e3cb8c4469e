"""Encoded bytes are the same on every code path: two publishers' digests of a group agree."""

import json
import os
import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from kvabr.codec.base import names
from kvabr.codec.native import coder
from kvabr.codec.profile import Profile
from kvabr.data.profiles import GEMMA3_270M, ShippedProfile, shipped_profiles
from kvabr_lab.bench import synthetic
from tests import kvdata
from tests.codec.native import oracle
from tests.codec.same.digests import Case, digests

DIMS = {64: (2, "half"), 80: (1, "interleaved"), 96: (3, "half"), 128: (2, "half"), 256: (1, "half")}
"""KV heads, and how keys are rotated."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _features() -> str:
    """Return what NumPy would use of this processor beyond its minimum."""
    there = np._core._multiarray_umath.__cpu_features__
    return " ".join(each for each in np._core._multiarray_umath.__cpu_dispatch__ if there.get(each))


PLACES = {
    "portable C, torch with AVX2": {"KVABR_CODER": "portable", "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"},
    "an old processor, three threads": {
        "ATEN_CPU_CAPABILITY": "default",
        "NPY_DISABLE_CPU_FEATURES": _features(),
        "OPENBLAS_CORETYPE": "Prescott",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "OMP_NUM_THREADS": "3",
        "GOMP_SPINCOUNT": "0",  # beside other tests they wait for each other
    },
}


@cache
def cases() -> tuple[Case, ...]:
    """Groups of many shapes and types, some hostile; with a profile where one is made in a moment."""
    made = []
    for number, (dim, (heads, rope)) in enumerate(DIMS.items()):
        spec = kvdata.spec(2, heads, dim, rope=rope, group_tokens=128)
        kv = kvdata.cache(spec, 128, number)
        odd = kvdata.cache(spec, 37, number).transpose(2, 3).contiguous().transpose(2, 3)
        profile = kvdata.profile(spec).to_bytes() if dim < 96 else None
        made += [
            Case(f"{dim}", spec, kv.to(DTYPES[number % 3]), 0, profile),
            Case(f"{dim} odd", spec, odd.to(DTYPES[(number + 1) % 3]), 0, profile),
            Case(f"{dim} loud", spec, (40 * kv).clamp(-65504, 65504).to(DTYPES[number % 3]), 256, profile),
            Case(f"{dim} repeated", spec, kv[:, :, :, :4].repeat(1, 1, 1, 32, 1), 256, profile),
            Case(f"{dim} nothing", spec, torch.zeros_like(kv), 256, profile),
        ]
    return tuple(made)


@cache
def shipped(profile: ShippedProfile) -> tuple[Case, ...]:
    """A group of each layer class in the shape of a model, and its profile."""
    data = profile.read()
    made = Profile.from_bytes(data)
    # The caches are made for position 0. Behind others, Gemma's keys stand out, and its groups would not be AC's.
    first = 0 if profile is GEMMA3_270M else 1024
    return tuple(
        Case(f"{profile.title} {number}", part, synthetic.cache(made.of(part), 70), first, data)
        for number, part in enumerate(made.spec.parts)
    )


def elsewhere(groups: tuple[Case, ...], folder: Path, environment: dict[str, str]) -> dict[str, str]:
    given, out = folder / "cases", folder / "digests.json"
    given.write_bytes(pickle.dumps(groups))
    command = [sys.executable, "-m", "tests.codec.same.digests", str(given), str(out)]
    root = Path(__file__).parents[3]
    inherited = {name: value for name, value in os.environ.items() if name != coder.VARIABLE}
    subprocess.run(command, check=True, cwd=root, env={**inherited, **environment})  # noqa: S603
    found: dict[str, str] = json.loads(out.read_text(encoding="utf-8"))
    return found


def here(groups: tuple[Case, ...]) -> dict[str, str]:
    return {name: digest for case in groups for name, digest in digests(case).items()}


@pytest.fixture(scope="module")
def every() -> tuple[tuple[Case, ...], dict[str, str]]:
    """Return all groups, and their digests here."""
    groups = (*cases(), *(case for each in shipped_profiles() for case in shipped(each)))
    return groups, here(groups)


@pytest.mark.parametrize("place", PLACES)
def test_on_another_machine_they_are_the_same(place, every, tmp_path):
    groups, wanted = every
    found = elsewhere(groups, tmp_path, PLACES[place])
    assert {name for name in wanted if found[name] != wanted[name]} == set()
    assert len(found) > 5 * len(groups)
    assert {name.split()[-1] for name in found} == set(names())


@pytest.mark.parametrize("path", oracle.PATHS)
def test_on_every_path_they_are_the_same(path):
    groups = tuple(case for case in cases() if case.name in ("64 odd", "80 odd"))
    wanted = here(groups)
    with oracle.taking(path):
        assert here(groups) == wanted
