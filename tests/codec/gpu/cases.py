"""Groups for the kernels, and what the oracle makes of them."""

import functools
from dataclasses import replace

import numpy as np
import torch

from kvabr.codec.fit import FitConfig, fit
from kvabr.codec.transform import Matrices, Stack, Structure, Transform
from kvabr.types.kv import KVSpec
from tests.codec.native import models, oracle
from tests.kvdata import related, spec

STEP = 0.07
SHAPE = spec(2, 1, 8)


def payloads(case):
    return case.encode(oracle.encode_indices)


def expected(case, coded, first, dtype):
    out = torch.empty(case.shape(), dtype=dtype)
    oracle.decode(case.job(coded, STEP, first, out))
    return out


def same(out, wanted):
    # Flat: a copy from another device keeps the order of memory, and a dimension of 1 then has any stride.
    one, other = (each.cpu().reshape(-1).view(torch.uint8) for each in (out, wanted))
    return out.shape == wanted.shape and torch.equal(one, other)


def cut(case, tokens):
    return models.Case(case.transform, case.models, tuple(np.array(index[:, :tokens]) for index in case.indices))


def narrow(seed):
    """Return a case with one layer of few channels, so that many tokens are fast enough."""
    dice = np.random.default_rng(seed)
    mantissa, gain = dice.integers(-128, 128, (2, 2)).astype(np.int8), dice.integers(0, 256, 2).astype(np.uint8)
    structure = Structure(KVSpec.uniform("m", "t", 1, 1, 3, "float32"), 1, (Stack(0, 0, 1, 2), Stack(1, 0, 1, 2)))
    mean, norm = dice.normal(size=(1, 2, 1, 3)).astype(np.float16), np.ones((1, 2), np.float32)
    return Transform(structure, mean, norm, None, (Matrices(mantissa, gain),) * 2, np.ones(1, np.float32), np.inf)


def long(seed, tokens, depths=2):
    dice = np.random.default_rng(seed)
    transform = narrow(seed)
    indices = [models.base_indices(dice, transform.structure.rows, tokens)]
    for _ in range(depths - 1):
        indices.append(models.finer_indices(dice, indices[-1]))
    tables = tuple(models.coder_model(dice, transform.structure.rows, refines=depth > 0) for depth in range(depths))
    return models.Case(transform, tables, tuple(indices))


def referring(seed, tokens, depths=2):
    """A case with references, and tables for them at some depths."""
    return replace(long(seed, tokens, depths), references=models.some_references(np.random.default_rng(seed), tokens))


@functools.cache
def fitted():
    config = FitConfig(stack_layers=2, kept=(4, 4), classes=6, outliers=0.0)
    return fit(SHAPE, lambda: [related(SHAPE, 300, seed) for seed in range(3)], config)
