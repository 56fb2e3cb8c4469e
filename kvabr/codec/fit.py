"""Fit a profile to caches of diverse texts: means, transforms, norms, and the tables of every depth.

Each pass reads two to four caches at a time, so memory holds little more than the matrices (in double precision) and
the counts. Results are added in cache order. Given the model's sensitivity to errors in each channel (`gradients`), a
block is transformed in units of that sensitivity, so that equal noise in all coefficients harms the model least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from kvabr.codec.analysis import Analysis, quietness
from kvabr.codec.coefficients import Coefficients
from kvabr.codec.columns import turned
from kvabr.codec.fit_references import add_references, tiles_counted
from kvabr.codec.native.coder_model import Quantiser
from kvabr.codec.native.references import TILE
from kvabr.codec.parallel_map import parallel_map
from kvabr.codec.profile import MAX_SINKS, MAX_STEP, ClassProfile, Depth
from kvabr.codec.quantised import is_quantised, numbers_of
from kvabr.codec.quantiser import SymbolCounts, coder_model, count, nested
from kvabr.codec.rope import rotate
from kvabr.codec.transform import (
    LARGEST,
    NO_MATRIX,
    RUN,
    Matrices,
    Quiet,
    Structure,
    Transform,
    layered,
    plain,
    rounded,
)
from kvabr.codec.unusual import likeness, sample
from kvabr.types.errors import FormatError, UsageError
from kvabr.types.kv import FP16_MAX, KVSpec
from kvabr.types.naming import LAYERS

Caches = Callable[[], Iterable[torch.Tensor]]
"""Yields the same caches on every call: [layer, K/V, head, token, dim], any float dtype, from position 0."""

Progress = Callable[[str, int], None]

_Found = TypeVar("_Found")

PASSES = ("means", "outliers", "channels", "stacks", "tables", "references")

_FLOOR = 1e-6
_RIDGE = 1e-6
"""Added to the diagonal of covariances, relative to the mean power, so that constant channels have components."""

STEPS = {"AC-L0": 3.3, "AC-L1": 1.1, "AC-L2": 1.1 / 3, "AC-L3": 1.1 / 9, "AC-5x": 0.185}
"""Steps by depth. Each layer's step is a third of the step below, so that layers nest."""

_MAX_TOKEN_RATIO = 100.0
"""Ratio to the layer's median peak above which a token's keys or values count as corrupt: one such number would ruin
the quantiser for its layer.
"""
_MIN_GRADIENT_RATIO = 20.0
"""Minimum ratio of quiet tokens' fraction of the gradients' power to their fraction of all tokens, for storing them
separately.
"""
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class FitConfig:
    """Options of a profile."""

    stack_layers: int = 15
    """Number of layers with jointly transformed keys or values."""
    kept: tuple[int, int] = (76, 76)
    block_heads: int | None = None
    """Heads transformed together; None: all heads of a layer, up to 512 channels."""
    transform: bool = True
    """Whether to fit transforms; False for small profiles."""
    sinks: int = 1
    """Number of first tokens of a prompt to store separately."""
    outliers: float = 0.005
    """Fraction of other tokens to store separately: the tokens with keys farthest from the mean. Models use a few
    tokens of every text as further sinks, and are a hundred times more sensitive to errors in these.
    """
    steps: Mapping[str, float] = field(default_factory=lambda: dict(STEPS))
    """Steps by depth; a channel's root mean square is about 1."""
    dead: Mapping[str, float] = field(default_factory=dict)
    """Dead zone by depth, see `kvabr.codec.quantiser.quantise`; default 0."""
    gains: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Decoder gains by depth, one per stack, see `kvabr.codec.profile.Depth.gains`; default: no gains."""
    quiet: float = 0.01
    """Maximum fraction of tokens stored separately for small values, see `kvabr.codec.transform.Quiet`. Requires
    gradients.
    """
    sensitivity: float = 0.8
    """Weight of the model's sensitivity in the transform, 0 to 1."""
    balance: float = 1.0
    """Weight of the sensitivity in the relative precision of layers and K/V."""
    evenness: float = 0.03
    """Minimum sensitivity of any channel, relative to the mean."""
    louder: tuple[float, ...] = (1.0, 1.45)
    """Amplitudes by which each cache is multiplied for counting. Some rows of other texts are louder, and tightly
    fitted tables would make these expensive.
    """
    classes: int = 32
    """Classes of rows per depth, at most 256."""

    def __post_init__(self) -> None:
        # Check first, as calibration takes minutes.
        if not 0 <= self.sinks <= MAX_SINKS:
            raise UsageError(f"sinks must be 0 to {MAX_SINKS}, got {self.sinks}")
        if not all(0 < step <= MAX_STEP for step in self.steps.values()):
            steps = ", ".join(f"{step:g}" for step in self.steps.values())
            raise UsageError(f"steps must be more than 0 and at most {MAX_STEP:g}, got {steps}")

    def scaled(self, factor: float) -> FitConfig:
        """Return a copy with all steps multiplied by a factor."""
        return replace(self, steps={track: factor * step for track, step in self.steps.items()})

    def of(self, part: KVSpec) -> FitConfig:
        """Return these options adapted to one layer class: states have no sinks and no joint heads."""
        if part.only.kind != "state":
            return self
        return replace(self, sinks=0, outliers=0.0, quiet=0.0, stack_layers=1, kept=(0, 0), block_heads=1)


def fit(
    spec: KVSpec,
    caches: Caches,
    config: FitConfig | None = None,
    progress: Progress = lambda _stage, _done: None,
    *,
    gradients: Caches | None = None,
) -> ClassProfile:
    """Fit the profile of one layer class.

    Args:
        spec: the model's spec, or that of one of its classes.
        caches: called once per pass; a state's cache has one or more snapshots along the axis of rows.
        config: options of the profile.
        progress: called after every cache of every pass.
        gradients: for each cache, the gradient of the model's output with respect to the cache's first tokens, or to
            one snapshot of a state, [layer, K/V, head, token, dim], from
            `kvabr.engines.transformers.TransformersEngine.gradient_classes`. None: all channels have equal weight.
    """
    config = config or FitConfig()
    return fit_tables(fit_transform(spec, caches, config, progress, gradients=gradients), caches, config, progress)


def fit_transform(
    spec: KVSpec,
    caches: Caches,
    config: FitConfig,
    progress: Progress = lambda _stage, _done: None,
    *,
    gradients: Caches | None = None,
) -> Transform:
    """Fit the parts of a profile that do not depend on steps; arguments are as for `fit`."""
    config = config.of(spec)
    structure = layered(spec, config.stack_layers, config.kept, config.block_heads) if config.transform else plain(spec)
    source = _Source(spec, caches, config.sinks, progress)
    # All components are rows until stacks are fitted.
    bare = replace(structure, stacks=tuple(replace(stack, kept=0) for stack in structure.stacks))
    transform = _outliers(_means(bare, source), source, config, gradients)
    transform = _channels(transform, source, config, gradients)
    if bare != structure:
        transform = _stacks(transform, structure, source)
    return transform


def fit_tables(
    transform: Transform, caches: Caches, config: FitConfig, progress: Progress = lambda _stage, _done: None
) -> ClassProfile:
    """Fit the tables of every depth for a given transform; arguments are as for `fit`."""
    spec, config = transform.structure.spec, config.of(transform.structure.spec)
    source = _Source(spec, caches, config.sinks, progress)
    analysis = Analysis(transform)
    depths, copies = _depths(analysis, source, config)

    def analysed(cache: _Cache) -> list[Coefficients]:
        tiles = tiles_counted(cache.number, cache.bare.shape[3])
        return [analysis.analyse(cache.bare[:, :, :, tile], None).here() for tile in tiles]

    # A state's columns are less similar to each other than tokens, and profiles without transforms should be small.
    if config.transform and spec.only.kind != "state":
        tiles = (tile for found in source.each("references", analysed) for tile in found)
        depths = add_references(depths, tiles, config.louder)
    return ClassProfile(spec, config.sinks, transform, depths, copies)


class _Cache(NamedTuple):
    number: int
    bare: torch.Tensor
    """The cache without sinks, as float32, keys without rotary embedding."""
    slope: torch.Tensor | None


@dataclass(frozen=True)
class _Source:
    spec: KVSpec
    caches: Caches
    sinks: int
    progress: Progress

    def each(self, stage: str, work: Callable[[_Cache], _Found], gradients: Caches | None = None) -> Iterator[_Found]:
        """Run ``work`` for every cache in other threads; yield the results in order."""
        slopes = None if gradients is None else iter(gradients())

        def given() -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
            for number, cache in enumerate(self.caches()):
                self._check(cache)
                if cache.shape[3] > self.sinks:
                    yield number, cache, None if slopes is None else next(slopes)

        def prepared(each: tuple[int, torch.Tensor, torch.Tensor | None]) -> _Found:
            number, cache, slope = each
            return work(_Cache(number, _sensible(self.bare(cache)), slope))

        seen = 0
        for found in parallel_map(prepared, given()):
            yield found
            seen += 1
            self.progress(stage, seen)
        if not seen:
            raise FormatError(f"calibration needs caches longer than {self.sinks} tokens")

    def _check(self, cache: torch.Tensor) -> None:
        good = cache.dim() == 5 and tuple(cache.shape) == self.spec.shape(cache.shape[3])
        if not good or (self.spec.only.kind == "state" and cache.shape[3] % self.spec.rows):
            raise FormatError(f"calibration: a cache of shape {tuple(cache.shape)} does not fit {self.spec.model}")

    def bare(self, cache: torch.Tensor) -> torch.Tensor:
        if is_quantised(cache.dtype):
            cache = numbers_of(cache, self.spec)
        bare = turned(cache, self.spec)[:, :, :, self.sinks :].to(torch.float32, copy=True)
        bare[:, 0] = rotate(bare[:, 0], self.spec.rope, self.sinks, undo=True)
        return bare

    def slope(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient with respect to the output of `bare`."""
        slope, rope = self.bare(gradient), self.spec.rope
        if rope is not None:
            # Undoing the rotation divides keys by the factor, so the gradient grows by it.
            slope[:, 0, ..., rope.first : rope.first + rope.rotary_dim] *= rope.factor**2
        return slope


def _sensible(bare: torch.Tensor) -> torch.Tensor:
    """Set corrupt tokens of a layer to zero, in place."""
    peak = torch.maximum(bare.amax(dim=(2, 4)), -bare.amin(dim=(2, 4)))  # [layer, K/V, token]; a copy takes longer
    usual = peak.nanmedian(dim=2, keepdim=True).values
    absurd = ~(peak <= FP16_MAX) | ((peak > _MAX_TOKEN_RATIO * usual) & (usual > 0))
    if bool(absurd.any()):
        bare.masked_fill_(absurd[:, :, None, :, None], 0)
    return bare


def _means(structure: Structure, source: _Source) -> Transform:
    spec = structure.coded
    layers, halves, heads, _, dim = spec.shape(1)
    total = torch.zeros((layers, halves, heads, dim), dtype=torch.float64)
    count = 0

    def sums_of(cache: _Cache) -> tuple[torch.Tensor, int]:
        return cache.bare.sum(dim=3, dtype=torch.float64), cache.bare.shape[3]

    for part, tokens in source.each("means", sums_of):
        total += part
        count += tokens
    ones, quiet = np.ones((layers, halves), np.float32), np.ones(layers, np.float32)
    none = (NO_MATRIX,) * len(structure.stacks)
    return Transform(structure, (total / count).half().numpy(), ones, None, none, quiet, float("inf"))


def _outliers(transform: Transform, source: _Source, config: FitConfig, gradients: Caches | None) -> Transform:
    """Measure the usual distance of keys from their mean, and the threshold that a fraction of tokens exceeds.

    With gradients, also measure values, and set the threshold below which tokens are quiet.
    """
    analysis = Analysis(transform)
    keys, values, minded = [], [], []

    def powers(cache: _Cache) -> tuple[torch.Tensor, ...]:
        channels, slope = analysis.centred(cache.bare), cache.slope
        power = analysis.key_power(channels)
        if slope is None:
            return (power,)
        slope = slope[:, :, :, source.sinks :].float().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return power, analysis.value_power(channels)[:, : slope.shape[3]], slope.square().sum(dim=(0, 1, 2, 4))

    for own, *more in source.each("outliers", powers, gradients if transform.structure.halves == 2 else None):
        keys.append(own)
        values += more[:1]
        minded += more[1:]
    every = torch.cat(keys, dim=1)
    spread = every.double().mean(dim=1).clamp(min=_FLOOR).sqrt().float()
    loudness = (every.sqrt() / spread[:, None]).amax(dim=0).numpy()
    share = config.outliers
    threshold = float(np.quantile(loudness, 1 - share, method="higher")) if share else float("inf")
    quiet = _quiet(torch.cat(values, dim=1), torch.cat(minded), config.quiet) if values else None
    return replace(transform, spread=spread.numpy(), threshold=threshold, quiet=quiet)


def _quiet(power: torch.Tensor, minded: torch.Tensor, share: float) -> Quiet | None:
    """Return a criterion for quiet tokens; None if the model is hardly more sensitive to these than to others.

    ``power`` is the squared distance of values from their mean, [layer, token]; ``minded`` are squared gradients,
    [token].
    """
    usual = power.double().mean(dim=1).clamp(min=_FLOOR).sqrt().float()
    score = torch.from_numpy(quietness(power.numpy(), usual.numpy()))
    order = score.argsort()
    most = int(share * len(order))
    gained = minded[order].double().cumsum(dim=0) / minded.double().sum().clamp(min=1e-300)
    worth = gained[:most] - _MIN_GRADIENT_RATIO * torch.arange(1, most + 1) / len(order)
    if not most or float(worth.max()) <= 0:
        return None
    # Halfway to the next token, to generalise to other texts.
    last = int(worth.argmax())
    threshold = float(score[order[last : last + 2]].mean())
    return Quiet(usual.numpy(), threshold) if 0 < threshold < 1 else None


def _channels(transform: Transform, source: _Source, config: FitConfig, gradients: Caches | None) -> Transform:
    analysis, structure = Analysis(transform), transform.structure
    spec, blocks, width = structure.coded, structure.blocks, structure.width
    total = torch.zeros((blocks, width), dtype=torch.float64)
    shape = (blocks, width, width) if config.transform else (blocks, width)
    scatter, minded = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    count = 0
    slopes = gradients if config.transform else None

    def sums_of(cache: _Cache) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
        channels, slope = analysis.centred(cache.bare), cache.slope
        usual = ~analysis.outlying(channels)
        own = torch.zeros(())
        if slope is not None:
            slope = source.slope(slope).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            same = slope.transpose(3, 4).reshape(blocks, width, -1)[:, :, usual[: slope.shape[3]]]
            # Weight between the gradient and its direction, as a few tokens in a calibration have huge gradients.
            same /= torch.linalg.vector_norm(same, dim=1, keepdim=True).clamp(min=1e-30).sqrt()
            own = torch.bmm(same, same.transpose(1, 2))
        channels = channels[:, :, usual]
        power = torch.bmm(channels, channels.transpose(1, 2)) if config.transform else channels.square().sum(dim=2)
        return channels.shape[2], channels.sum(dim=2, dtype=torch.float64), power, own

    for tokens, sums, power, own in source.each("channels", sums_of, slopes):
        count += tokens
        total += sums
        scatter += power
        minded += own
    if not count:
        raise FormatError("calibration: every token is an outlier")
    off = total / count
    mean = (torch.from_numpy(transform.mean.astype(np.float64)) + off.reshape(transform.mean.shape)).half().numpy()
    if not config.transform:
        power = (scatter / count - off.square()).clamp(min=0).view(spec.layers, structure.halves, -1).mean(dim=2)
        return replace(transform, mean=mean, norm=power.sqrt().clamp(min=_FLOOR).float().numpy())
    common = scatter / count - off[:, :, None] * off[:, None, :]
    shapes = _shapes(_steady(common), minded if slopes is not None else _by_side(common, structure), config)
    top = shapes.abs().amax(dim=(1, 2)).view(spec.layers, structure.halves, -1).amax(dim=2)
    norm = (top / LARGEST).clamp(min=_FLOOR).float()
    whole = norm.repeat_interleave(structure.per_layer, dim=1).reshape(blocks, 1, 1)
    return replace(transform, mean=mean, norm=norm.numpy(), block=rounded(shapes / whole))


def _by_side(common: torch.Tensor, structure: Structure) -> torch.Tensor | None:
    keys, values = structure.coded.only.split
    if structure.halves == 2 or not values:
        return None
    power = common.diagonal(dim1=1, dim2=2).reshape(len(common), structure.block_heads, keys + values)
    sides = (side.mean(dim=(1, 2), keepdim=True).expand_as(side) for side in power.split_with_sizes([keys, values], 2))
    return torch.diag_embed(1 / torch.cat(tuple(sides), dim=2).clamp(min=_FLOOR**2).reshape(len(common), -1))


def _shapes(common: torch.Tensor, minded: torch.Tensor | None, config: FitConfig) -> torch.Tensor:
    """Return each component's unit vector in channel space, [block, channel, component], most powerful first.

    ``common`` is the covariance of channels, ``minded`` that of gradients, [block, channel, channel].
    """
    width = common.shape[-1]
    one = torch.eye(width, dtype=common.dtype)
    weight = torch.ones(len(common), dtype=common.dtype)
    if minded is None:
        ahead = back = one.expand_as(common)
    else:
        loss = (minded * common).sum(dim=(1, 2)).clamp(min=1e-300)
        weight = (loss.log() - loss.log().mean()).mul(config.balance / 2).exp()
        level = minded.diagonal(dim1=1, dim2=2).mean(dim=1).clamp(min=1e-300)
        values, vectors = torch.linalg.eigh(minded / level[:, None, None] + config.evenness * one)
        ahead, back = (
            (vectors * values.clamp(min=_FLOOR).pow(power)[:, None]) @ vectors.transpose(1, 2)
            for power in (config.sensitivity / 2, -config.sensitivity / 2)
        )
    seen = ahead @ common @ ahead
    weight = weight / seen.diagonal(dim1=1, dim2=2).mean(dim=1).sqrt()
    out: torch.Tensor = back @ torch.linalg.eigh(seen).eigenvectors.flip(-1) / weight[:, None, None]
    return out


def _stacks(transform: Transform, structure: Structure, source: _Source) -> Transform:
    analysis = Analysis(transform)
    sizes = [structure.width_of(stack) for stack in structure.stacks]
    scatters = [torch.zeros((size, size), dtype=torch.float64) for size in sizes]

    def products(cache: _Cache) -> list[torch.Tensor]:
        found = analysis.analyse(cache.bare, None).here()
        components, made = found.rows[:, ~found.outlying], []
        for number, (stack, scatter) in enumerate(zip(structure.stacks, scatters, strict=True)):
            if not stack.kept:
                made.append(scatter)
                continue
            own = components[slice(*structure.first_rows[number : number + 2])]
            across = own.reshape(-1, structure.width, own.shape[1])[:, : stack.kept].reshape(len(scatter), -1)
            made.append(across @ across.T)
        return made

    analysis.prepare()
    for found in source.each("stacks", products):
        for scatter, product in zip(scatters, found, strict=True):
            scatter.add_(product)

    def principal(scatter: torch.Tensor) -> Matrices:
        """Return the principal components, most powerful first."""
        if not len(scatter):
            return NO_MATRIX
        return rounded(torch.linalg.eigh(_steady(scatter)).eigenvectors.flip(-1), run=RUN)

    return replace(transform, structure=structure, stack=tuple(parallel_map(principal, scatters)))


def _depths(analysis: Analysis, source: _Source, config: FitConfig) -> tuple[dict[str, Depth], float | None]:
    """Return the fitted tables of every depth, and the median of `Likeness.copies`; None without a base."""
    rows, chain = analysis.structure.rows, nested(config.steps)
    counts = {track: SymbolCounts.nothing(rows, refines=below is not None) for track, below in chain.items()}
    quantisers = {track: Quantiser(step, config.dead.get(track, 0.0)) for track, step in config.steps.items()}
    parts = [(slice(first, first + _ROWS_AT_ONCE), Lock()) for first in range(0, rows, _ROWS_AT_ONCE)]

    def counted(cache: _Cache) -> list[float]:
        coefficients = analysis.analyse(cache.bare, None).here()
        # Separately stored tokens count as zeros, as in the encoder.
        every = (coefficients.rows * ~coefficients.outlying).numpy()
        for part, lock in parts:
            own = {track: (quantisers[track], seen.of(part)) for track, seen in counts.items()}
            with lock:
                for boost in config.louder:
                    count(every[part], boost, own)
        if LAYERS[0] not in chain:
            return []
        tiles = [slice(start, start + TILE) for start in range(0, every.shape[1], TILE)]
        kept = ~coefficients.outlying.numpy()
        step = config.steps[LAYERS[0]]
        looked = coefficients.some(sample(rows))
        return [likeness(looked[:, tile], step, kept[tile]).copies for tile in tiles]

    analysis.prepare()
    copies = [each for found in source.each("tables", counted) for each in found]
    made = parallel_map(lambda track: coder_model(counts[track], config.classes, small=not config.transform), chain)
    depths = {
        track: Depth(quantisers[track].step, quantisers[track].dead, model, config.gains.get(track, ()))
        for track, model in zip(chain, made, strict=True)
    }
    told = [each for each in copies if each]  # 0: too short to measure
    return depths, round(float(np.median(told)), 3) if told else None


def _steady(common: torch.Tensor) -> torch.Tensor:
    """Regularise covariances [..., channel, channel] so that no channel is constant."""
    ridge = _RIDGE * common.diagonal(dim1=-2, dim2=-1).mean(dim=-1).clamp(min=_FLOOR**2)
    out: torch.Tensor = common + ridge[..., None, None] * torch.eye(common.shape[-1], dtype=common.dtype)
    return out
