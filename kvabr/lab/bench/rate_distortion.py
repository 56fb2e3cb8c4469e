"""`kvabr bench rd` without its command line: which schemes, in which order, and the result as plain JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvabr.codec.base import codec, names
from kvabr.codec.profile import Profile
from kvabr.lab.bench.contexts import Context, plant
from kvabr.lab.bench.measure import EXACT, Findings, QualityBench
from kvabr.lab.bench.peers import CacheGenQuantiser, LMCacheCodec, Zstd, find_peers
from kvabr.lab.bench.schemes import Kivi, OwnTrack, Scheme, TrackScheme, tracks_to_measure
from kvabr.lab.bench.summary import RateCurve, at_group_size, curve, exact_recall, match, scheme_rows

SCHEMA = "kvabr.bench.rd/1"
AC = "AC"
"""The curve of the tracks that a profile serves."""
_PLAIN = {"floats": ("FP", "BF"), "integers": ("Int",)}
"""Families of the tracks that need none, by how their names begin."""
TARGET = "CacheGen"
"""What kvabr is held against: LMCache's only setting."""

Row = dict[str, Any]


@dataclass(frozen=True)
class BenchPlan:
    """What to measure."""

    contexts: Sequence[Context]
    tracks: Sequence[str] | None = None
    """Tracks of kvabr; None for all."""
    profiles: Mapping[str, Profile] | None = None
    """By label; each adds its own points to the curve. Without any, tables are estimated from each cache itself."""
    peers: Path | None = None
    """Folder of the peers; None for none."""
    cachegen: Sequence[str] = (TARGET,)
    """Which of CacheGen's levels, see `kvabr.lab.bench.peers.LEVELS`."""
    group_tokens: Sequence[int] = ()
    """Lengths of groups; quality is measured with the first, sizes with all. Empty: the model's own."""
    retrieval: int = 0
    """Contexts that codes are planted in."""


@dataclass(frozen=True)
class Schemes:
    """All that a plan names."""

    coded: list[Scheme]
    """Whose sizes and losses are measured."""
    recalled: list[Scheme]
    """Whose retrieval is measured: the same caches, without peers where those only cost time."""
    resized: dict[int, list[Scheme]]
    """The same with other lengths of groups, by length."""


def run(bench: QualityBench, plan: BenchPlan) -> tuple[Findings, dict[str, str], list[str]]:
    """Measure.

    Args:
        bench: the model and its work folder.
        plan: what to measure.

    Returns:
        What was found, the curve that each scheme belongs to, and what to say of peers that are not there.

    Raises:
        UsageError: a track is named twice.
        PeerError: a peer failed.
    """
    with ExitStack() as stack:
        schemes, notes = _schemes(bench, plan, stack)
        findings = Findings()
        bench.prefill(plan.contexts)
        findings.quality = bench.quality(schemes.coded, plan.contexts)
        for size, resized in schemes.resized.items():
            findings.sizes[size] = bench.sizes(resized, plan.contexts)
        if plan.retrieval:
            needles = list(plant(bench.loaded, plan.contexts[: plan.retrieval]))
            findings.recall = bench.recall(schemes.recalled, needles)
    return findings, {scheme.name: scheme.family for scheme in schemes.coded}, notes


def _schemes(bench: QualityBench, plan: BenchPlan, stack: ExitStack) -> tuple[Schemes, list[str]]:
    first, *others = plan.group_tokens or (bench.store.spec.group_tokens,)
    ours = _tracks(bench, plan, first)
    coded: list[Scheme] = [*ours, Kivi(4, group_tokens=first), Kivi(2, group_tokens=first)]
    # What needs no peer is recalled as it is; zstd changes no cache.
    recalled: list[Scheme] = [*coded, *(CacheGenQuantiser(name) for name in plan.cachegen)]
    resized: dict[int, list[Scheme]] = {size: [*_tracks(bench, plan, size)] for size in others}
    found, notes = ({}, []) if plan.peers is None else find_peers(plan.peers)
    for peer in found.values():
        stack.enter_context(peer)
    if "lmcache" in found:
        coded += [LMCacheCodec(found["lmcache"], bench.store, name, group_tokens=first) for name in plan.cachegen]
        for size in others:
            resized[size] += [LMCacheCodec(found["lmcache"], bench.store, group_tokens=size)]
    else:
        # Its quality is known without it; its size is not.
        coded += [CacheGenQuantiser(name) for name in plan.cachegen]
    if "zstd" in found:
        spec = bench.store.spec
        coded += [Zstd(name, width, spec, found["zstd"], bench.store) for name, width in (("FP16", 2), ("Int8", 1))]
    return Schemes(coded, recalled, resized), notes


def _tracks(bench: QualityBench, plan: BenchPlan, group_tokens: int) -> list[Scheme]:
    spec, profiles = bench.store.spec, plan.profiles or {}
    out: list[Scheme] = []
    for name in tracks_to_measure(plan.tracks, names()):
        if not codec(name).needs_profile:
            family = next((family for family, start in _PLAIN.items() if name.startswith(start)), name)
            out.append(TrackScheme(name, spec, group_tokens=group_tokens, family=family))
            continue
        if not profiles:
            out.append(OwnTrack(name, spec, group_tokens=group_tokens))
        # A profile that was made for a sweep may have one track alone.
        for label, profile in ((label, made) for label, made in profiles.items() if name in made.depths):
            out.append(TrackScheme(name, spec, profile, group_tokens=group_tokens, label=label, family=AC))
    return out


def result(findings: Findings, families: Mapping[str, str], contexts: Sequence[Context]) -> Row:
    """All that was found, as plain JSON values.

    Args:
        findings: what `run` returned.
        families: as `run` returned it.
        contexts: what was measured on.
    """
    return {
        "schema": SCHEMA,
        "contexts": [{"name": one.name, "tokens": len(one.tokens)} for one in contexts],
        "schemes": scheme_rows(findings, families),
        "domains": _domains(findings, contexts),
        "exact": exact_recall(findings),
        "against": _against(findings, families),
        "by_context": findings.quality,
        "by_case": findings.recall,
        "by_group_size": findings.sizes,
    }


def _domains(findings: Findings, contexts: Sequence[Context]) -> Row:
    """Mean size and KL of every scheme by domain."""
    out: Row = {}
    for scheme, rows in findings.quality.items():
        for domain in dict.fromkeys(one.domain for one in contexts):
            some = [rows[one.name] for one in contexts if one.domain == domain]
            means = {key: sum(row[key] for row in some) / len(some) for key in ("bits", "kl", "dnll", "top1")}
            out.setdefault(domain, {})[scheme] = means
    return out


def _against(findings: Findings, families: Mapping[str, str]) -> Row | None:
    """Where kvabr's curve reaches CacheGen's quality, and what that saves with every length of groups."""
    ours = [name for name, family in families.items() if family == AC]
    if len(ours) < 2 or TARGET not in findings.quality:
        return None
    mine = curve(findings, ours)
    found = match(mine, curve(findings, [TARGET]))
    found["group_sizes"] = _group_sizes(findings, mine, found)
    return found


def _group_sizes(findings: Findings, mine: RateCurve, found: Row) -> list[Row]:
    rows = []
    for size, sizes in findings.sizes.items():
        theirs = [row["bits"] for row in sizes.get(TARGET, {}).values()]
        ours = None if found["bits"] is None else at_group_size(mine, found["bits"], sizes)
        if theirs and ours is not None:
            mean = sum(theirs) / len(theirs)
            rows.append({"group_tokens": size, "ours": ours, "theirs": mean, "ratio": mean / ours})
    return rows


def cases(findings: Findings) -> int:
    """Retrieval cases that were measured."""
    return len(findings.recall.get(EXACT, {}))
