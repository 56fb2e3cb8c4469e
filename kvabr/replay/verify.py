"""Verifies a simulated play with the real model: decode, recompute, assemble, score.

The steps of the play run in their original order on the asset's bytes, so recomputed groups inherit the errors of
preceding lossy groups.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvabr.codec.profile import Profile
from kvabr.player.assembler import Assembler, Placement
from kvabr.publish.model import ScoringEngine
from kvabr.publish.reference import Reference
from kvabr.store.asset import Asset
from kvabr.types.engine import prefill_classes
from kvabr.types.errors import FormatError, ModelError
from kvabr.types.loss import played_loss, promised_loss


@dataclass(frozen=True, slots=True)
class FetchStep:
    """The asset's frame of ``group`` (of `Catalog.to_play`) on ``track`` arrived and was decoded."""

    group: int
    track: str


@dataclass(frozen=True, slots=True)
class ComputeStep:
    """Groups ``first`` to ``last`` - 1 were recomputed from the cache before them."""

    first: int
    last: int


Step = FetchStep | ComputeStep


@dataclass(frozen=True, slots=True)
class Verification:
    """Measurements of the real model on the assembled cache of a play, see `kvabr.types.catalog.Quality`."""

    kl: float
    dnll: float
    top1: float
    loss: float
    """Measured loss, defined like `Quality.loss`, to compare with the loss in the catalog."""
    predicted: float

    def to_json(self) -> dict[str, float]:
        """Return plain JSON values."""
        return asdict(self)


def steps_of(record: Sequence[tuple[str, int, int | str]]) -> list[Step]:
    """Parse the steps of a play's record: ("fetch", group, track) or ("compute", first, last).

    Raise `FormatError` for other steps.
    """
    steps: list[Step] = []
    for kind, where, what in record:
        if kind == "fetch" and isinstance(what, str):
            steps.append(FetchStep(where, what))
        elif kind == "compute" and isinstance(what, int):
            steps.append(ComputeStep(where, what))
        else:
            raise FormatError(f"not a step of a play: {(kind, where, what)!r}")
    return steps


def load_profile(asset: Asset) -> Profile | None:
    """Return the codec profile of an asset; None if no track needs one.

    Raises:
        AssetError: the profile is missing.
        FormatError: the profile is not the one that the catalog names.
        ForeignError: the profile is for another model.
    """
    data = asset.profile_bytes()
    if data is None:
        return None
    profile = Profile.from_bytes(data)
    profile.check(asset.catalog.spec)
    return profile


class Verifier:
    """Verifies plays of one asset; computes the exact cache once and keeps only its scores."""

    def __init__(self, asset: Asset, engine: ScoringEngine) -> None:
        """Compute the exact cache of the asset's prompt and score its continuation.

        Raises:
            ModelError: the engine runs another model than the asset's.
            AssetError, FormatError: the asset's prompt or profile is missing or damaged.
        """
        if not engine.spec.same_cache(asset.catalog.spec):
            raise ModelError(
                f"{asset.location}: the cache is of {asset.catalog.spec.model}, not of {engine.spec.model}"
            )
        self._asset, self._engine = asset, engine
        self._profile = load_profile(asset)
        prompt = asset.prompt()
        self._tokens = prompt.tokens
        exact = prefill_classes(engine, prompt.tokens)
        self._dtype = exact[0].dtype if len({part.dtype for part in exact}) == 1 else None
        self._reference = Reference(engine, exact, prompt.continuation)

    def play(self, steps: Sequence[Step]) -> Verification:
        """Run the steps of one play, and score the continuation after the resulting cache.

        Raises:
            HoleError: the steps leave a hole, or compute after one.
            AssetError, FormatError: a group is missing or damaged.
        """
        catalog = self._asset.catalog.to_play
        assembler = Assembler(catalog, self._profile, dtype=self._dtype)
        done: list[tuple[str, int, int | str]] = []
        for step in steps:
            if isinstance(step, FetchStep):
                name, number = catalog.address(step.group, step.track)
                verdict = assembler.put(step.group, step.track, self._asset.frame(number, name))
                if verdict is not Placement.STALE:
                    done.append(("fetch", step.group, step.track))
            else:
                begin, end = map(catalog.tokens_before, (step.first, step.last))
                before = assembler.before_classes(step.first) if step.first else None
                parts = prefill_classes(self._engine, self._tokens[begin:end], before)
                assembler.put_computed(step.first, step.last, *parts)
                done.append(("compute", step.first, step.last))
        quality = self._reference.measure(assembler.before_classes(catalog.groups))
        coverage = [track or "" for track in assembler.coverage]
        promised = promised_loss(catalog, coverage, played_loss(catalog, done))
        return Verification(quality.kl, quality.dnll, quality.top1, quality.loss, promised)


_VERIFIERS: weakref.WeakKeyDictionary[ScoringEngine, tuple[Asset, Verifier]] = weakref.WeakKeyDictionary()


def verify_play(asset: Asset, engine: ScoringEngine, steps: Sequence[Step]) -> Verification:
    """Verify one play; the scores of the engine's last asset are cached. See `Verifier.play`."""
    known = _VERIFIERS.get(engine)
    if known is None or known[0] != asset:
        known = (asset, Verifier(asset, engine))
        _VERIFIERS[engine] = known
    return known[1].play(steps)
