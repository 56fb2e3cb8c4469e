"""`kvabr bench rd` without its command line: chooses schemes, runs them, and returns plain JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvabr.codec.base import codec, names
from kvabr.codec.profile import Profile
from kvabr.types.kv import KVSpec
from kvabr_lab.bench import kvtc
from kvabr_lab.bench.contexts import Context, plant, seen_shares
from kvabr_lab.bench.measure import EXACT, Findings, QualityBench
from kvabr_lab.bench.other_codecs import CacheGenQuantiser, LMCacheCodec, Zstd, find_peers
from kvabr_lab.bench.rivals import EngineFp8, Kivi, NvFp4, TurboQuant
from kvabr_lab.bench.schemes import OwnTrack, Scheme, TrackScheme, tracks_to_measure
from kvabr_lab.bench.summary import RateCurve, at_group_size, curve, exact_recall, match, scheme_rows, text_row

SCHEMA = "kvabr.bench.rd/1"
AC = "AC"
"""Curve of the tracks that need a profile."""
ENDS = {"AC-L0": ("AC-L1", "AC-L2"), "AC-L1": ("AC-L2",), "AC-L2": ("AC-L3",)}
"""Tracks that are also measured with a finer last group, as in plays that choose a track per group."""
AC_END = f"{AC}, end finer"
_PLAIN = {"floats": ("FP", "BF", "Raw"), "integers": ("Int",)}
"""Families of the other tracks, by the first letters of their names."""
TARGET = "CacheGen"

Row = dict[str, Any]


@dataclass(frozen=True)
class BenchPlan:
    """The measurements to run."""

    contexts: Sequence[Context]
    tracks: Sequence[str] | None = None
    profiles: Mapping[str, Profile] | None = None
    """Profiles by label, each with separate points on the curve. If empty, tables are estimated from each cache."""
    peers: Path | None = None
    cachegen: Sequence[str] = (TARGET,)
    """Levels to measure, see `kvabr_lab.bench.other_codecs.LEVELS`."""
    group_tokens: Sequence[int] = ()
    """Group sizes in tokens: quality is measured with the first, sizes with all. Empty: the model's group size."""
    retrieval: int = 0
    """Number of contexts in which codes are planted."""
    kvtc: Sequence[float] = ()
    """Compression ratios of KVTC, see `kvabr_lab.bench.kvtc`; transforms are learnt on first use."""
    spec: KVSpec | None = None


@dataclass(frozen=True)
class Schemes:
    """The schemes of a plan."""

    coded: list[Scheme]
    recalled: list[Scheme]
    """Schemes for retrieval: they give the same caches, without slow peers."""
    resized: dict[int, list[Scheme]]


def run(bench: QualityBench, plan: BenchPlan) -> tuple[Findings, dict[str, str], list[str]]:
    """Run the measurements of a plan.

    Returns:
        The findings, the curve of each scheme, and a message for each missing peer.

    Raises:
        UsageError: A track is named twice.
        PeerError: A peer failed.
    """
    with ExitStack() as stack:
        schemes, notes = _schemes(bench, plan, stack)
        findings = Findings()
        bench.prefill(plan.contexts)
        findings.quality = bench.quality(schemes.coded, plan.contexts)
        findings.texts = bench.texts(plan.contexts)
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
    coded += [EngineFp8(), NvFp4(), *(TurboQuant(bits) for bits in (4, 3, 2))]
    usual = [scheme for scheme in coded if scheme.family != AC_END]
    # Retrieval needs no peers: CacheGen's quantiser gives the same cache, and zstd is lossless.
    recalled: list[Scheme] = [*usual, *(CacheGenQuantiser(name) for name in plan.cachegen)]
    coded += _kvtc(bench, plan, first)
    resized: dict[int, list[Scheme]] = {size: [*_tracks(bench, plan, size)] for size in others}
    found, notes = ({}, []) if plan.peers is None else find_peers(plan.peers)
    for peer in found.values():
        stack.enter_context(peer)
    if "lmcache" in found:
        coded += [LMCacheCodec(found["lmcache"], bench.store, name, group_tokens=first) for name in plan.cachegen]
        for size in others:
            resized[size] += [LMCacheCodec(found["lmcache"], bench.store, group_tokens=size)]
    else:
        # Without LMCache, the quality is known, but not the size.
        coded += [CacheGenQuantiser(name) for name in plan.cachegen]
    if "zstd" in found:
        spec = bench.store.spec
        coded += [Zstd(name, width, spec, found["zstd"], bench.store) for name, width in (("FP16", 2), ("Int8", 1))]
    return Schemes(coded, recalled, resized), notes


def _kvtc(bench: QualityBench, plan: BenchPlan, group_tokens: int) -> list[Scheme]:
    """Return KVTC at every ratio, both with the last tokens exact as in the paper, and with these coded, too."""
    if not plan.kvtc:
        return []
    spec = plan.spec or bench.store.spec
    bases = kvtc.learned(bench.loaded, spec, bench.store.folder, partial(bench.progress, "kvtc"))
    return [
        kvtc.Kvtc(ratio, spec, bases, recent=recent, group_tokens=group_tokens)
        for ratio in plan.kvtc
        for recent in (0, kvtc.RECENT)
    ]


def _tracks(bench: QualityBench, plan: BenchPlan, group_tokens: int) -> list[Scheme]:
    spec, profiles = plan.spec or bench.store.spec, plan.profiles or {}
    out: list[Scheme] = []
    wanted = tracks_to_measure(plan.tracks, names())
    for name in wanted:
        if not codec(name).needs_profile:
            family = next((family for family, start in _PLAIN.items() if name.startswith(start)), name)
            out.append(TrackScheme(name, spec, group_tokens=group_tokens, family=family))
            continue
        if not profiles:
            out.append(OwnTrack(name, spec, group_tokens=group_tokens))
        # A profile made for a sweep may have only one track.
        for label, profile in ((label, made) for label, made in profiles.items() if name in made.tracks):
            track = partial(TrackScheme, name, spec, profile, group_tokens=group_tokens, label=label)
            out.append(track(family=AC))
            ends = (end for end in ENDS.get(name, ()) if end in wanted and end in profile.tracks)
            out += [track(family=AC_END, end=end) for end in ends]
    return out


def result(findings: Findings, families: Mapping[str, str], plan: BenchPlan) -> Row:
    """Return all results of `run` as plain JSON values."""
    contexts = plan.contexts
    seen = seen_shares(contexts, (plan.profiles or {}).values())
    return {
        "schema": SCHEMA,
        "contexts": [{"name": one.name, "tokens": len(one.tokens), "seen": seen[one.name]} for one in contexts],
        "schemes": scheme_rows(findings, families),
        "text": text_row(findings),
        "domains": _domains(findings, contexts),
        "exact": exact_recall(findings),
        "against": _against(findings, families),
        "against_end": _against_end(findings, families),
        "by_context": findings.quality,
        "by_case": findings.recall,
        "by_group_size": findings.sizes,
    }


def _domains(findings: Findings, contexts: Sequence[Context]) -> Row:
    out: Row = {}
    for scheme, rows in findings.quality.items():
        for domain in dict.fromkeys(one.domain for one in contexts):
            some = [rows[one.name] for one in contexts if one.domain == domain]
            means = {key: sum(row[key] for row in some) / len(some) for key in ("bits", "kl", "loss", "dnll", "top1")}
            out.setdefault(domain, {})[scheme] = means
    return out


def _against(findings: Findings, families: Mapping[str, str]) -> Row | None:
    ours = [name for name, family in families.items() if family == AC]
    if len(ours) < 2 or TARGET not in findings.quality:
        return None
    mine = curve(findings, ours)
    found = match(mine, curve(findings, [TARGET]))
    found["group_sizes"] = _group_sizes(findings, mine, found)
    return found


def _against_end(findings: Findings, families: Mapping[str, str]) -> Row | None:
    ends = [name for name, family in families.items() if family == AC_END]
    base = [name for name, family in families.items() if family == AC and name.startswith(next(iter(ENDS)))]
    if not ends or TARGET not in findings.quality:
        return None
    return match(curve(findings, [*base, *ends]), curve(findings, [TARGET]))


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
    """Return the number of retrieval cases."""
    return len(findings.recall.get(EXACT, {}))
