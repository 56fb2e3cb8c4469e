"""The encoder's transform with AVX-512 against torch, over layouts, lengths and element types."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvabr.codec import analysis
from kvabr.codec.analysis import Analysis, Coefficients
from kvabr.codec.native import coder
from kvabr.codec.transform import NO_MATRIX, RUN, Stack, Structure, Transform, layered, plain, rounded
from kvabr.types.errors import FormatError
from kvabr.types.kv import KVSpec, RopeSpec

pytestmark = pytest.mark.skipif(
    "avx512" not in coder.available_paths() or not analysis.native_available(), reason="this processor has no AVX-512"
)

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
    """Random rotations, means and norms."""
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


def by_torch(it: Analysis, group: torch.Tensor, first: int, patch: pytest.MonkeyPatch) -> Coefficients:
    with patch.context() as path:
        path.setenv(coder.VARIABLE, "portable")
        return it.analyse(group, first)


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("tokens", [1, 16, 37, 128, 150])
def test_it_is_what_torch_makes(name: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    it, first = transform(STRUCTURES[name], tokens), 1000
    shape = it.structure.spec.shape(tokens)
    group = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(tokens))
    group[:, :, :, tokens // 2] *= 40
    wanted, got = by_torch(it, group, first, monkeypatch), it.analyse(group, first)
    loudest = float(wanted.rows.abs().max())
    assert torch.allclose(got.rows, wanted.rows, rtol=0, atol=2e-6 * loudest)
    assert torch.allclose(got.reach, wanted.reach, rtol=1e-5)
    assert torch.equal(got.outlying, wanted.outlying)
    assert bool(got.outlying[tokens // 2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (3, 0, 1, 2, 4), (0, 1, 2, 4, 3)])
def test_any_floats_in_any_order(dtype: torch.dtype, order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    it = transform(STRUCTURES["grouped"], 1)
    wanted_shape = it.structure.spec.shape(50)
    there = torch.randn([wanted_shape[axis] for axis in order]).to(dtype)
    group = there.permute([order.index(axis) for axis in range(5)])
    wanted, got = by_torch(it, group, 0, monkeypatch), it.analyse(group, 0)
    assert torch.allclose(got.rows, wanted.rows, rtol=0, atol=1e-5)


def test_many_threads_make_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    it = transform(STRUCTURES["grouped"], 2)
    group = torch.randn(it.structure.spec.shape(40))
    alone = it.analyse(group, 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(it.analyse(group, 0).rows, alone.rows)


def test_a_group_of_another_shape_is_refused() -> None:
    it = transform(STRUCTURES["grouped"], 3)
    with pytest.raises(FormatError, match="cannot hold"):
        it.analyse(torch.zeros(UNTURNED.shape(4)), 0)


def test_arrays_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        analysis._kvanalysis.analysis(
            (0, 0, 2), (2, 16, 2), 8, 16, 0, np.zeros((2, 2, 16), np.float32), np.ones(2, np.float32),
            np.zeros((2, 32, 31), np.float32), np.eye(16, dtype=np.float32),
        )  # fmt: skip
