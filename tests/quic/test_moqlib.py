"""Names and errors between moq-rs and kvabr."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvabr.quic import moq_lib as moqlib
from kvabr.types.errors import FormatError
from kvabr.types.naming import TrackNamespace

MODELS = st.from_regex(r"[^/\x00\ud800-\udfff]{1,20}(/[^/\x00\ud800-\udfff]{1,20}){0,2}", fullmatch=True)
PROMPTS = st.from_regex(r"[0-9a-f]{64}", fullmatch=True)


@given(MODELS, PROMPTS, st.sampled_from(["draft", "split"]))
def test_a_path_leads_back_to_its_namespace(model, prompt, names):
    namespace = TrackNamespace(model, prompt)
    path = moqlib.path_of(namespace, names)
    assert moqlib.namespace_of(path) == namespace
    assert moqlib.namespace_of(re.sub(r"\\//", r"\\/", path)) == namespace  # what moq-lite makes of it


def test_the_two_forms_of_a_path():
    namespace = TrackNamespace("org/model", "0" * 64)
    assert moqlib.path_of(namespace, "split") == f"moq:/kvcache.moq.arpa/v1/org/model/{'0' * 64}"
    assert moqlib.path_of(namespace, "draft") == rf"moq:\/\/kvcache.moq.arpa\/v1\//org\/model/{'0' * 64}"


@pytest.mark.parametrize(
    "path", ["", "/", "\\", "a/b", "moq:/kvcache.moq.arpa/v1", "moq:/kvcache.moq.arpa/v1/m/xyz", "a" * 9000]
)
def test_other_paths_are_refused(path):
    with pytest.raises(FormatError):
        moqlib.namespace_of(path)


def test_priorities_run_the_other_way():
    assert [moqlib.moq_priority(priority) for priority in (0, 10, 255, -1, 300)] == [255, 245, 0, 255, 0]
