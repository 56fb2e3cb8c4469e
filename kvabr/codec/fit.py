"""Fits a profile to caches of diverse texts: means, transforms, norms, and the tables of every depth.

The caches are seen one at a time, in several passes, so memory holds the matrices, in double precision, and the counts.
If it is known how much the model minds an error in each channel (`gradients`), the transform of a block is that of the
channels in units of what the model minds: noise of the same power in all coefficients then costs it the least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.native.model import TILE
from kvabr.codec.profile import MAX_SINKS, Depth, Profile
from kvabr.codec.quantiser import Counts, coder_model, nested, quantise
from kvabr.codec.rope import rotate
from kvabr.codec.structure import Structure, layered, plain
from kvabr.codec.transform import LARGEST, RUN, Detector, Transform, rounded
from kvabr.types.errors import FormatError, UsageError
from kvabr.types.kv import KVSpec

Caches = Callable[[], Iterable[torch.Tensor]]
"""The same caches whenever it is called: [layer, K/V, head, token, dim], any float dtype, each from position 0 on."""

Progress = Callable[[str, int], None]
"""Told of every cache that a pass is done with: the pass, and how many it has seen."""

PASSES = ("means", "outliers", "channels", "stacks", "tables")

_LEAST = 1e-6
_RIDGE = 1e-6
"""Added to what channels have in common, in units of their mean power: constant channels have components too."""

STEPS = {"AC-L0": 3.3, "AC-L1": 1.1, "AC-L2": 1.1 / 3, "AC-L3": 1.1 / 9, "AC-5x": 0.185}
"""Steps of every depth. The layers' nest, so each is a third of the one below."""

_TOP = 65504.0
"""FP16's largest number."""
_ABSURD = 100.0
"""How much louder than the median a token's keys, or values, of a layer are if they cannot be meant: one such number
would make a quantiser so coarse that nothing else of its layer were left."""
_BEYOND = 1e6
"""Indices that large are not told apart: no table has a symbol for them, and no integer is to overflow."""
_LONGEST_STEP = 1024.0


@dataclass(frozen=True)
class FitConfig:
    """What a profile is to be like."""

    stack_layers: int = 15
    """Layers whose keys, or values, are transformed together."""
    kept: tuple[int, int] = (76, 76)
    """Components of each block of keys, and of values, that take part in that."""
    block_heads: int | None = None
    """Heads that are transformed together; None: all of a layer, if they are not too many."""
    transform: bool = True
    """False: no transform at all, for profiles that must be small."""
    sinks: int = 1
    """Tokens at the beginning of a prompt that are kept aside, in 8 bits."""
    outliers: float = 0.002
    """Share of the other tokens that are kept aside as well, those whose keys stand out most: models use a few tokens
    of every text as further sinks, and mind errors in these a hundred times more. 0: none."""
    steps: Mapping[str, float] = field(default_factory=lambda: dict(STEPS))
    """Step of every depth; a channel's root mean square is about 1."""
    dead: Mapping[str, float] = field(default_factory=dict)
    """Dead zone of a depth's encoder, see `kvabr.codec.quantiser.quantise`; 0 for those left out."""
    sensitivity: float = 0.8
    """How far the transform follows what the model minds, from 0 (not at all) to 1."""
    balance: float = 1.0
    """The same for how finely each layer's keys, and values, are quantised against the others."""
    evenness: float = 0.03
    """Least that the model is taken to mind of any channel, against the mean."""
    louder: tuple[float, ...] = (1.0, 1.45)
    """How loud each cache is taken to be when indices are counted: texts that a calibration never saw are louder in
    some rows, and tables that fit too well cost more there than they save elsewhere."""
    classes: int = 32
    """Classes of rows at each depth, at most 256."""

    def __post_init__(self) -> None:
        # A calibration takes minutes: what a profile cannot have is refused before.
        if not 0 <= self.sinks <= MAX_SINKS:
            raise UsageError(f"a profile keeps 0 to {MAX_SINKS} sinks aside, not {self.sinks}")
        if not all(0 < step <= _LONGEST_STEP for step in self.steps.values()):
            steps = ", ".join(f"{step:g}" for step in self.steps.values())
            raise UsageError(f"steps of {steps}: each must be above 0, and at most {_LONGEST_STEP:g}")

    def scaled(self, factor: float) -> FitConfig:
        """The same with all steps longer by a factor."""
        return replace(self, steps={track: factor * step for track, step in self.steps.items()})


def fit(
    spec: KVSpec,
    caches: Caches,
    config: FitConfig | None = None,
    progress: Progress = lambda _stage, _done: None,
    *,
    gradients: Caches | None = None,
) -> Profile:
    """Make a profile.

    Args:
        spec: the model's spec.
        caches: called once for every pass.
        config: what the profile is to be like.
        progress: told of every cache in every pass.
        gradients: for each cache, how what the model says next changes with its first tokens: [layer, K/V, head, token,
            dim] of fewer tokens than the cache, as `kvabr.engines.transformers.TransformersEngine.gradient` has it.
            None: the model minds every channel of a layer's keys, or values, alike.

    Raises:
        FormatError: no tokens beyond the sinks, or caches of another shape.
    """
    config = config or FitConfig()
    structure = layered(spec, config.stack_layers, config.kept, config.block_heads) if config.transform else plain(spec)
    source = _Source(spec, caches, config.sinks, progress)
    transform = _means(structure, source)
    transform = replace(transform, detector=_outliers(transform, source, config.outliers))
    transform = _channels(transform, source, config, gradients)
    if any(stack.kept for stack in structure.stacks):
        transform = _stacks(transform, source)
    return Profile(spec, config.sinks, transform, _depths(transform, source, config))


@dataclass(frozen=True)
class _Source:
    """Caches, pass by pass."""

    spec: KVSpec
    caches: Caches
    sinks: int
    progress: Progress

    def __call__(self, stage: str) -> Iterator[torch.Tensor]:
        """The caches without sinks, float32, keys without rotary embedding."""
        seen = 0
        for cache in self.caches():
            if cache.dim() != 5 or tuple(cache.shape) != self.spec.shape(cache.shape[3]):
                raise FormatError(f"calibration: a cache of shape {tuple(cache.shape)} is not one of {self.spec.model}")
            if cache.shape[3] > self.sinks:
                yield _sensible(self.bare(cache))
                seen += 1
                self.progress(stage, seen)
        if not seen:
            raise FormatError(f"calibration needs caches longer than {self.sinks} tokens")

    def bare(self, cache: torch.Tensor) -> torch.Tensor:
        """One of them."""
        bare = cache[:, :, :, self.sinks :].float().clone()
        bare[:, 0] = rotate(bare[:, 0], self.spec.rope, self.sinks, undo=True)
        return bare

    def slope(self, gradient: torch.Tensor) -> torch.Tensor:
        """How what the model says changes with what `bare` returns, from how it changes with the cache."""
        slope, rope = self.bare(gradient), self.spec.rope
        if rope is not None:
            # Undoing divides by the factor; but what is turned is as many times longer, and its gradient as well.
            slope[:, 0, ..., : rope.rotary_dim] *= rope.factor**2
        return slope


def _sensible(bare: torch.Tensor) -> torch.Tensor:
    """A cache whose absurd tokens are 0 in their layer, in place; an encoder keeps such tokens aside."""
    peak = bare.abs().amax(dim=(2, 4))  # [layer, K/V, token]
    usual = peak.nanmedian(dim=2, keepdim=True).values
    absurd = ~(peak <= _TOP) | ((peak > _ABSURD * usual) & (usual > 0))
    if bool(absurd.any()):
        bare.masked_fill_(absurd[:, :, None, :, None], 0)
    return bare


def _means(structure: Structure, source: _Source) -> Transform:
    """A transform that does nothing yet but know the means."""
    spec = structure.spec
    total = torch.zeros((spec.layers, 2, spec.kv_heads, spec.head_dim), dtype=torch.float64)
    count = 0
    for bare in source("means"):
        total += bare.sum(dim=3, dtype=torch.float64)
        count += bare.shape[3]
    none = torch.zeros((0, 0), dtype=torch.int8), torch.zeros(0, dtype=torch.uint8)
    ones = torch.ones((spec.layers, 2))
    quiet = Detector(torch.ones(spec.layers), float("inf"))
    return Transform(structure, (total / count).half(), ones, None, (none,) * len(structure.stacks), quiet)


def _outliers(transform: Transform, source: _Source, share: float) -> Detector:
    """How far keys are from their mean as a rule, and how far the given share of tokens is at least."""
    power = [transform.key_power(transform.centred(bare)) for bare in source("outliers")]
    every = torch.cat(power, dim=1)  # [layer, token]: few numbers
    spread = every.double().mean(dim=1).clamp(min=_LEAST).sqrt().float()
    loudness = (every.sqrt() / spread[:, None]).amax(dim=0).numpy()
    return Detector(spread, float(np.quantile(loudness, 1 - share, method="higher")) if share else float("inf"))


def _channels(transform: Transform, source: _Source, config: FitConfig, gradients: Caches | None) -> Transform:
    """Better means, the transforms of blocks, and the norms."""
    structure, spec = transform.structure, transform.structure.spec
    blocks, width = structure.blocks, structure.width
    total = torch.zeros((blocks, width), dtype=torch.float64)
    # Without a transform only the powers of the channels count.
    shape = (blocks, width, width) if config.transform else (blocks, width)
    scatter, minded = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    count = 0
    slopes = iter(gradients()) if gradients is not None and config.transform else None
    for bare in source("channels"):
        channels = transform.centred(bare)
        usual = ~transform.outlying(channels)
        if slopes is not None:
            slope = source.slope(next(slopes)).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            same = slope.transpose(3, 4).reshape(blocks, width, -1)[:, :, usual[: slope.shape[3]]]
            # Between the gradient and its direction: a few tokens, of which calibration sees too few, have huge ones.
            same /= torch.linalg.vector_norm(same, dim=1, keepdim=True).clamp(min=1e-30).sqrt()
            minded += torch.bmm(same, same.transpose(1, 2))
        channels = channels[:, :, usual]
        total += channels.sum(dim=2, dtype=torch.float64)
        scatter += torch.bmm(channels, channels.transpose(1, 2)) if config.transform else channels.square().sum(dim=2)
        count += channels.shape[2]
    if not count:
        raise FormatError("calibration: every token is an outlier")
    off = total / count
    mean = (transform.mean.double() + off.reshape(transform.mean.shape)).half()
    if not config.transform:
        power = (scatter / count - off.square()).clamp(min=0).view(spec.layers, 2, -1).mean(dim=2)
        return replace(transform, mean=mean, norm=power.sqrt().clamp(min=_LEAST).float())
    common = scatter / count - off[:, :, None] * off[:, None, :]
    shapes = _shapes(_steady(common), minded if slopes is not None else None, config)
    top = shapes.abs().amax(dim=(1, 2)).view(spec.layers, 2, -1).amax(dim=2)
    norm = (top / LARGEST).clamp(min=_LEAST).float()
    whole = norm.repeat_interleave(structure.per_layer, dim=1).reshape(blocks, 1, 1)
    return replace(transform, mean=mean, norm=norm, block=rounded(shapes / whole))


def _shapes(common: torch.Tensor, minded: torch.Tensor | None, config: FitConfig) -> torch.Tensor:
    """What one unit of every component is in channels, [block, channel, component], the most powerful first.

    Args:
        common: covariance of the channels, [block, channel, channel].
        minded: the same for the gradients, in any unit; None: all channels count alike.
        config: how far to follow them.
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
            (vectors * values.clamp(min=_LEAST).pow(power)[:, None]) @ vectors.transpose(1, 2)
            for power in (config.sensitivity / 2, -config.sensitivity / 2)
        )
    seen = ahead @ common @ ahead
    weight = weight / seen.diagonal(dim1=1, dim2=2).mean(dim=1).sqrt()
    out: torch.Tensor = back @ torch.linalg.eigh(seen).eigenvectors.flip(-1) / weight[:, None, None]
    return out


def _stacks(transform: Transform, source: _Source) -> Transform:
    """The transforms of stacks."""
    structure = transform.structure
    sizes = [structure.width_of(stack) for stack in structure.stacks]
    scatters = [torch.zeros((size, size), dtype=torch.float64) for size in sizes]
    for bare in source("stacks"):
        channels = transform.centred(bare)
        channels = transform.normed(channels[:, :, ~transform.outlying(channels)])
        for stack, scatter in zip(structure.stacks, scatters, strict=True):
            if stack.kept:
                across = transform.components(channels, stack)[:, : stack.kept].reshape(len(scatter), -1)
                scatter.add_(across @ across.T)
    made = []
    for scatter, none in zip(scatters, transform.stack, strict=True):
        made.append(rounded(_turn(scatter), run=RUN) if len(scatter) else none)
    return replace(transform, stack=tuple(made))


def _turn(scatter: torch.Tensor) -> torch.Tensor:
    """Principal components, the most powerful first."""
    out: torch.Tensor = torch.linalg.eigh(_steady(scatter)).eigenvectors.flip(-1)
    return out


def _depths(transform: Transform, source: _Source, config: FitConfig) -> dict[str, Depth]:
    """Tables of every depth."""
    rows, chain = transform.structure.rows, nested(config.steps)
    counts = {track: Counts.nothing(rows, refines=below is not None) for track, below in chain.items()}
    for bare in source("tables"):
        coefficients = transform.coefficients(transform.centred(bare))
        # Tokens that are kept aside are zeros here, as an encoder has them.
        every = coefficients.rows * ~coefficients.outlying
        for start in range(0, every.shape[1], TILE):
            for loud in config.louder:
                _count(every[:, start : start + TILE] * loud, chain, config, counts)
    return {
        track: Depth(
            config.steps[track],
            coder_model(counts[track], config.classes, small=not config.transform),
            config.dead.get(track, 0.0),
        )
        for track in chain
    }


def _count(
    tile: torch.Tensor, chain: Mapping[str, str | None], config: FitConfig, counts: Mapping[str, Counts]
) -> None:
    made: dict[str, NDArray[np.int32]] = {}
    for track, below in chain.items():
        step = config.steps[track]
        index = quantise(tile, step, config.dead.get(track, 0.0)).clamp_(-_BEYOND, _BEYOND)
        made[track] = index.int().numpy()
        counts[track].add(made[track], None if below is None else made[below])


def _steady(common: torch.Tensor) -> torch.Tensor:
    """Covariances [..., channel, channel] of channels of which none is quite constant."""
    ridge = _RIDGE * common.diagonal(dim1=-2, dim2=-1).mean(dim=-1).clamp(min=_LEAST**2)
    out: torch.Tensor = common + ridge[..., None, None] * torch.eye(common.shape[-1], dtype=common.dtype)
    return out
