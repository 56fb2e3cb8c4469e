"""Names that cover the document alone are found again; names that cover what stands before it are not."""

import asyncio
from statistics import fmean

from kvabr_lab.bench.passage_reuse import NAMINGS, Collection, reuse

SMALL = Collection(documents=8, queries=24, each=3)


def test_documents_are_found_by_their_content_for_ever_and_not_so_by_prefixes():
    found = {naming: asyncio.run(reuse(SMALL, naming)) for naming in NAMINGS}
    assert found["content"] == [1.0] * 24
    assert found["both"][0] == 1.0
    assert fmean(found["both"][-8:]) < 0.8
    assert fmean(found["prefix"]) < 0.5
