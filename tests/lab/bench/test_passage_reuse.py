"""Names that cover the document alone are found again; names that cover what stands before it are not."""

import asyncio
from statistics import fmean

import pytest

from kvabr_lab.bench.passage_reuse import NAMINGS, Collection, reuse

SMALL = Collection(documents=8, queries=24, each=3)


@pytest.fixture(scope="module")
def found():
    return {naming: asyncio.run(reuse(SMALL, naming)) for naming in NAMINGS}


def test_every_document_is_found_by_its_content_for_ever(found):
    assert found["content"] == [1.0] * 24


def test_what_is_stored_by_prefix_and_looked_up_by_content_is_forgotten(found):
    assert found["both"][0] == 1.0
    assert fmean(found["both"][-8:]) < 0.8


def test_by_prefix_only_equal_beginnings_are_found(found):
    assert fmean(found["prefix"]) < 0.5
