"""References in payloads, and how an encoder chooses them.

A self-contained payload with references (`kvabr.codec.native.references`) begins with a marker in place of the number
of listed tokens:

    0xFFFFFFFC | references | the rest, like other payloads

Layers above use the same references. A token refers to one with similar coefficients: a repeated word, construction, or
indentation. Receivers need no token ids, and groups stay independent.
"""

from __future__ import annotations

import struct

import numpy as np
import torch
from numpy.typing import NDArray

from kvabr.codec.native import coder
from kvabr.codec.native.coder_model import CoderModel, derived
from kvabr.codec.native.references import LANES, References, join_references, tiles
from kvabr.types.errors import FormatError

REFERRING = 0xFFFFFFFC
MARK = struct.pack("<I", REFERRING)

_MAX_COMPARED_ROWS = 1024
_LARGEST = 3
"""Limit of the indices compared, so that no row dominates."""
_AT_ONCE = 16
_MIN_CORRELATION = 0.5
"""If tokens and their references correlate less than this on average, also try a payload without references."""


def choose_references(rows: torch.Tensor, step: float, keep: NDArray[np.bool_]) -> tuple[References, bool] | None:
    """Choose a group's references; also return True if they certainly make its payload smaller.

    ``rows`` are the `informative_rows` of the coefficients, [row, token] float32, in the processor's memory; ``step``
    is that of a quantiser with mostly zero indices; ``keep`` marks coded tokens, [token]. Return None if the group is
    too short. The choice is the same on every machine.
    """
    if not tiles(rows.shape[1]):
        return None
    every = np.arange(len(rows))
    parts, worth = {}, []
    for tile in tiles(rows.shape[1]):
        products = coder.similarity(rows.numpy(), every, np.arange(tile.start, tile.stop), step, _LARGEST)
        gram = (products * keep[tile] * keep[tile, None]).astype(np.float32)
        power = np.maximum(np.diag(gram), 1)
        alike = gram / np.sqrt(power * power[:, None])
        np.fill_diagonal(alike, -1)
        second, named = _matched(alike)
        parts[tile.start] = second, named
        worth.append(float(alike[second, named[second]].mean()))
    return join_references(parts, rows.shape[1]), min(worth) > _MIN_CORRELATION


def informative_rows(model: CoderModel) -> NDArray[np.intp]:
    """Return the rows with the most power according to the coder's tables, for choosing references."""
    return derived(model, "loud", lambda: _strong_rows(model))


def _strong_rows(model: CoderModel) -> NDArray[np.intp]:
    values = np.arange(model.freqs.shape[2]) - model.radius[:, None].astype(np.float64)
    inside = np.arange(model.freqs.shape[2]) <= 2 * model.radius[:, None].astype(np.int64)
    power = (model.freqs[:, 0] * values**2 * inside).sum(axis=1)[model.row_class] * model.flag_freq[0]
    return np.sort(np.argsort(-power, kind="stable")[:_MAX_COMPARED_ROWS])


def _matched(alike: NDArray[np.float32]) -> tuple[NDArray[np.bool_], NDArray[np.intp]]:
    """Return a mask of the second step's tokens, all but `LANES`, and each token's most similar first-step token.

    The choice is greedy: the next token is the one most similar to a token of the first step, after deducting the loss
    for tokens that refer to it. ``alike`` has the similarities, [token, other], -1 on the diagonal.
    """
    first, among = np.ones(len(alike), bool), alike.copy()
    named = among.argmax(axis=1)
    most = among[np.arange(len(alike)), named]
    while (left := int(first.sum()) - LANES) > 0:
        later = np.flatnonzero(~first)
        others = among[later]
        others[np.arange(len(later)), named[later]] = -1
        lost = np.bincount(named[later], most[later] - others.max(axis=1), len(alike))
        worth = np.where(first, most - lost, -np.inf)
        chosen: list[int] = []
        needed: set[int] = set()
        names, free = named.tolist(), first.tolist()
        for token in np.argsort(-worth, kind="stable")[: 2 * _AT_ONCE].tolist():
            fits = free[token] and token not in needed and names[token] not in chosen
            if fits and len(chosen) < min(left, _AT_ONCE):
                chosen.append(token)
                needed.add(names[token])
        first[chosen] = False
        among[:, chosen] = -1
        again = np.flatnonzero(~first[named])
        named[again] = among[again].argmax(axis=1)
        most[again] = among[again, named[again]]
    return ~first, named


def checked_refers(payload: bytes | memoryview, track: str, tokens: int) -> bool:
    """Return True if an untrusted payload has references; raise `FormatError` if its group is too small for them."""
    refers = payload[: len(MARK)] == MARK
    if refers and not tiles(tokens):
        raise FormatError(f"{track}: a group of {tokens} tokens is too small for references; the payload is corrupt")
    return refers
