"""Finds the longest prefix of a prompt among the pages of a store, in few rounds of requests. No I/O.

A page describes up to `PAGE_GROUPS` (16) groups. It is named by the chained digest of any of its groups, and is usable
up to the last digest that it shares with the prompt. The first round requests the page of every 16th group, each full,
and of the last group. The final round requests pages that end inside the first missing one. If there are more than
`_AT_ONCE` full pages, the first round requests only that many, and further rounds extend the search by the factor
`_GROWS`, so that a long prompt with a short cached prefix needs few requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal, NamedTuple

from kvabr.store.names import PAGE_GROUPS
from kvabr.store.pages import Entries, Page
from kvabr.transfer.interface import FoundPrefix
from kvabr.types.catalog import Catalog, CommonFacts, Level, Track
from kvabr.types.errors import FormatError
from kvabr.types.naming import TrackNamespace
from kvabr.types.records import fields_of
from kvabr.types.units import hit, units_of

_AT_ONCE, _GROWS = 31, 5
"""Full pages requested in the first round, enough for 511 groups; and the factor by which the searched pages grow per
round."""


class PageRequest(NamedTuple):
    """A request for a page that may exist."""

    kind: Literal["page", "end"]
    """``page``: a page; ``end``: the last page of an asset with recurrent states."""
    group: int
    """Group whose digest names the page."""


class PageSearch:
    """The search for one prompt: request the pages of `wanted` until it returns none, then read `found`."""

    def __init__(self, digests: Sequence[str], *, states: bool = False) -> None:
        """``digests``: the prompt's chained digests, or prefixes of them; ``states``: the spec has recurrent states."""
        self._digests, self._states = digests, states
        self._full = len(digests) // PAGE_GROUPS
        self._pages: dict[int, Page] = {}
        self._reach = 0
        self._tails: list[Page] = []
        """Pages shared only in part, and last pages of assets."""
        self._requested: set[PageRequest] = set()
        self._round: list[PageRequest] = []

    def wanted(self) -> list[PageRequest]:
        """Return the requests of the next round; empty at the end."""
        self._round = [request for request in self._next() if request not in self._requested]
        self._requested.update(self._round)
        return list(self._round)

    def take(self, answers: Mapping[PageRequest, Page | None]) -> None:
        """Process the answers to `wanted`; missing pages are None or absent."""
        for request in self._round:
            page = answers.get(request)
            number = request.group // PAGE_GROUPS
            shared = page.shared(self._digests) if page is not None and page.first == number * PAGE_GROUPS else 0
            whole = request.kind == "page" and (request.group + 1) % PAGE_GROUPS == 0
            if whole and shared == PAGE_GROUPS and page is not None:
                self._pages[number] = page
            elif not whole and shared and page is not None and page not in self._tails:
                self._tails.append(page)

    @property
    def found(self) -> list[Page]:
        """The pages of the longest prefix, in order, all of one kind; the last may be shared only in part."""
        run = self._run()
        tails = [page for page in self._tails if page.first <= run * PAGE_GROUPS]
        best = max(tails, key=lambda page: page.first + page.shared(self._digests), default=None)
        whole = [self._pages[number] for number in range(run)]
        # The last page of an asset has a snapshot that inner pages lack.
        if best is not None and best.first + best.shared(self._digests) >= run * PAGE_GROUPS:
            whole = [*whole[: best.first // PAGE_GROUPS], best]
        return list(takewhile(lambda page: page.kind == whole[0].kind, whole))

    # -------------------------------------------------------------- internals

    def _run(self) -> int:
        return next((number for number in range(self._full) if number not in self._pages), self._full)

    def _next(self) -> list[PageRequest]:
        run, begun = self._run(), self._reach
        if self._requested and (run < begun or begun == self._full):
            return self._inside(run)
        self._reach = min(self._full, begun * _GROWS or _AT_ONCE)
        requests = list(map(self._page, range(begun, self._reach)))
        return requests if begun else [*requests, *self._last()]

    @staticmethod
    def _page(number: int) -> PageRequest:
        return PageRequest("page", (number + 1) * PAGE_GROUPS - 1)

    def _last(self) -> list[PageRequest]:
        last = len(self._digests) - 1
        requests = [PageRequest("page", last)] if len(self._digests) % PAGE_GROUPS else []
        return [*requests, PageRequest("end", last)] if self._states else requests

    def _inside(self, run: int) -> list[PageRequest]:
        """Return the requests for pages that cover only the beginning of a missing page."""
        first, groups = run * PAGE_GROUPS, len(self._digests)
        if any(page.first <= first and page.shared(self._digests) + page.first == groups for page in self._tails):
            return []
        requests = [PageRequest("page", group) for group in range(first, min(first + PAGE_GROUPS - 1, groups))]
        whole = self._states and first + PAGE_GROUPS <= groups
        return [*requests, PageRequest("end", first + PAGE_GROUPS - 1)] if whole else requests


def prefix_of(pages: Sequence[Page]) -> FoundPrefix:
    """Return the catalog of consecutive pages from the first group on, cut to the groups with snapshots.

    Raises `FormatError` if the pages are inconsistent.
    """
    facts, spec = pages[0], pages[0].spec
    chunks, size = tuple(digest for page in pages for digest in page.chunks), pages[0].spec.group_tokens
    if not all(page.whole for page in pages[:-1]):
        raise FormatError("pages: a page lacks tokens, although another follows it")
    tokens, entries = pages[-1].first * size + pages[-1].tokens, Entries(pages)
    limited_by: str | None = None
    units = units_of(spec, tokens)
    names = [part.track_name(facts.levels[0].name) for part in spec.parts]
    if any((names[unit.part], unit.group) not in entries for unit in units):
        # The last page does not end its asset, so it has no snapshot of a state at its end.
        groups, limited_by = hit(spec, len(chunks), tokens + 1)
        if not groups:
            return FoundPrefix(None, limited_by)
        chunks, tokens = chunks[:groups], groups * size
        units = units_of(spec, tokens)
    # Tails are fractions of a whole asset's loss; only the last page of an asset may be partial.
    rest: dict[str, Any] = {} if not pages[-1].whole else {"tails": ()}
    tracks = [Track(**fields_of(level, Level) | rest, **entries.listing(spec, level, units)) for level in facts.levels]
    catalog = Catalog(
        namespace=TrackNamespace(spec.model, chunks[-1]),
        spec=spec,
        tokens=tokens,
        chunks=chunks,
        tracks=tuple(tracks),
        **fields_of(facts, CommonFacts),
        position=facts.position,
    )
    tag = hashlib.sha256("".join(digest for track in tracks for digest in track.digests).encode()).hexdigest()
    return FoundPrefix(catalog, limited_by, tag)
