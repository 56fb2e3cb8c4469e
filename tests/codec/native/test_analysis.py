"""The encoder's transform on every path: the same bits, over layouts, lengths and element types, and precise."""

import numpy as np
import pytest
import torch

from kvabr.codec import analysis
from kvabr.codec.analysis import Analysis
from kvabr.codec.coefficients import Coefficients
from kvabr.codec.rope import rotate
from kvabr.codec.transform import NO_MATRIX, ONE, RUN, Stack, Structure, Transform, layered, plain, rounded
from kvabr.types.kv import KVSpec, RopeSpec
from tests.codec.native import oracle

NATIVE = tuple(analysis._kvanalysis.paths())

GROUPED = KVSpec.uniform("grouped", "t", 5, 2, 16, "float32", RopeSpec(10000.0, 16))
PARTIAL = KVSpec.uniform("partial", "t", 3, 3, 20, "float32", RopeSpec(10000.0, 12, "interleaved", factor=1.25))
UNTURNED = KVSpec.uniform("unturned", "t", 2, 1, 40, "float32")
STRUCTURES = {
    "grouped": layered(GROUPED, 2, (8, 12)),
    "a block for each head": layered(PARTIAL, 3, (4, 8), 1),
    "values first": Structure(UNTURNED, 1, (Stack(1, 0, 2, 14), Stack(0, 1, 2, 0), Stack(0, 0, 1, 40))),
    "no blocks": plain(PARTIAL),
}


def transform(structure: Structure, seed: int) -> Analysis:
    dice = torch.Generator().manual_seed(seed)

    def rotation(size: int) -> torch.Tensor:
        return torch.linalg.qr(torch.randn(size, size, generator=dice))[0]

    spec = structure.spec
    kept = any(stack.kept for stack in structure.stacks)
    made = Transform(
        structure,
        torch.randn((spec.layers, 2, spec.kv_heads, spec.head_dim), generator=dice).half().numpy(),
        (torch.rand((spec.layers, 2), generator=dice) + 0.5).numpy(),
        rounded(torch.stack([rotation(structure.width) for _ in range(structure.blocks)])) if kept else None,
        tuple(
            rounded(rotation(structure.width_of(stack)), run=RUN) if stack.kept else NO_MATRIX
            for stack in structure.stacks
        ),
        (torch.rand(spec.layers, generator=dice) + 4).numpy(),
        1.5,
    )
    return Analysis(made)


def by(path: str, it: Analysis, group: torch.Tensor, first: int | None = 0) -> Coefficients:
    with oracle.taking(path):
        return it.analyse(group, first)


def same(one: Coefficients, other: Coefficients) -> bool:
    return (
        one.rows.numpy().tobytes() == other.rows.numpy().tobytes()
        and torch.equal(one.reach, other.reach)
        and torch.equal(one.largest, other.largest)
        and torch.equal(one.outlying, other.outlying)
    )


def everywhere(it: Analysis, group: torch.Tensor, first: int | None = 0) -> Coefficients:
    """Analyse on every path, and return what all of them make."""
    wanted = by(oracle.ORACLE, it, group, first)
    for path in NATIVE:
        assert same(by(path, it, group, first), wanted), path
    return wanted


def exactly(it: Analysis, group: torch.Tensor, first: int) -> torch.Tensor:
    """Return the rows in double precision."""
    transform, structure = it.transform, it.structure
    bare = group.double()
    bare[:, 0] = rotate(group[:, 0], structure.coded.rope, first, undo=True).double()
    bare -= torch.from_numpy(transform.mean.astype(np.float64))[:, :, :, None]
    norm = np.repeat(transform.norm.astype(np.float64).reshape(-1), structure.per_layer)
    channels = (
        bare.transpose(3, 4).reshape(structure.blocks, structure.width, -1) / torch.from_numpy(norm)[:, None, None]
    )
    if transform.block is not None:
        channels = torch.linalg.solve(torch.from_numpy(transform.block.expanded / ONE), channels)
    rows = []
    for stack, matrix in zip(structure.stacks, transform.stack, strict=True):
        parts = channels[structure.blocks_of(stack)]
        across = parts[:, : stack.kept].reshape(-1, parts.shape[2])
        if stack.kept:
            across = torch.linalg.solve(torch.from_numpy(matrix.expanded / ONE), across)
        rows += [across, parts[:, stack.kept :].reshape(-1, parts.shape[2])]
    return torch.cat(rows)


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("tokens", [1, 16, 37, 128, 150])
def test_all_paths_make_the_same_and_it_is_precise(name: str, tokens: int) -> None:
    it, first = transform(STRUCTURES[name], tokens), 1000
    shape = it.structure.spec.shape(tokens)
    group = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(tokens))
    group[:, :, :, tokens // 2] *= 40
    got = everywhere(it, group, first)
    wanted = exactly(it, group, first)
    # In each token's own unit: a loud token does not make its neighbours less precise.
    error = (got.rows - wanted).abs().amax(dim=0) / wanted.square().sum(dim=0).sqrt()
    assert float(error.max()) < 2e-4
    assert bool(got.outlying[tokens // 2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (3, 0, 1, 2, 4), (0, 1, 2, 4, 3)])
def test_any_floats_in_any_order(dtype: torch.dtype, order: tuple[int, ...]) -> None:
    it = transform(STRUCTURES["grouped"], 1)
    wanted_shape = it.structure.spec.shape(50)
    there = torch.randn([wanted_shape[axis] for axis in order]).to(dtype)
    group = there.permute([order.index(axis) for axis in range(5)])
    assert same(everywhere(it, group), by(oracle.ORACLE, it, group.float().contiguous()))


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("kind", ["zero", "subnormal", "huge", "one channel", "largest", "mixed"])
def test_hostile_groups_are_the_same_everywhere(name: str, kind: str) -> None:
    it = transform(STRUCTURES[name], 5)
    dice = torch.Generator().manual_seed(1)
    group = torch.randn(it.structure.spec.shape(70), generator=dice)
    if kind == "zero":
        group.zero_()
    elif kind == "subnormal":
        group *= 1e-42
    elif kind == "huge":
        group *= 3e38 / float(group.abs().max())
    elif kind == "one channel":
        group[..., 3] = 65504
    elif kind == "largest":
        group = 65504 * group.sign()
    else:
        group *= torch.exp2(torch.randint(-130, 16, (70, 1), generator=dice).float())
    found = everywhere(it, group)
    assert bool(torch.isfinite(found.rows).all())
    if kind == "huge":
        assert float(found.reach.min()) > 2.0**20  # no depth can code such tokens, so that all are stored as they are


@pytest.mark.parametrize("path", [*NATIVE, oracle.ORACLE])
def test_a_token_is_the_same_in_every_group(path: str) -> None:
    it = transform(STRUCTURES["grouped"], 7)
    group = torch.randn(it.structure.spec.shape(140))
    whole = by(path, it, group, None).rows
    for first, last in ((0, 1), (5, 20), (100, 140)):
        assert torch.equal(by(path, it, group[:, :, :, first:last], None).rows, whole[:, first:last])


def test_arrays_of_other_sizes_are_refused() -> None:
    matrix = np.zeros((2, 32, 31), np.int16), np.ones((2, 32), np.float32), np.ones((2, 32), np.float32)
    stack = np.eye(16, dtype=np.int16), np.ones(16, np.float32), np.ones(16, np.float32)
    mean = np.zeros((2, 2, 16), np.float32)
    with pytest.raises(ValueError, match="do not belong together"):
        analysis._kvanalysis.analysis((0, 0, 2), (2, 16, 2, 0), 8, 16, 0, mean, np.ones(2, np.float32), matrix, stack)
