"""Fusion losses of a model: they hold for it, and for passages that were computed as those that were measured."""

import json

import pytest

from kvabr.publish.fusion import FusionLosses
from kvabr.types.errors import AssetError, ForeignError, FormatError, UsageError
from kvabr.types.kv import KVSpec

SPEC = KVSpec.uniform("toy", "bytes", 2, 2, 8, "float16")
FOUND = FusionLosses(SPEC, 4, ((0.0, 0.03), (0.15, 0.01)), "measured on paper")


def test_they_survive_the_file_and_become_notes(tmp_path):
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(FOUND.to_json()))
    assert FusionLosses.read(path) == FOUND
    notes = FOUND.notes(SPEC, "mean", 4)
    assert (notes.base, notes.contexts, notes.fusion, notes.method) == ("mean", 4, FOUND.losses, "measured on paper")
    assert notes.fusion_loss(0.075) == pytest.approx(0.02)


def test_the_group_size_does_not_matter_and_the_model_does():
    assert (
        FOUND.notes(KVSpec.uniform("toy", "bytes", 2, 2, 8, "float16", group_tokens=16), "mean", 4).fusion
        == FOUND.losses
    )
    for other in (
        KVSpec.uniform("toy-2", "bytes", 2, 2, 8, "float16"),
        KVSpec.uniform("toy", "bytes", 3, 2, 8, "float16"),
    ):
        with pytest.raises(ForeignError, match=r"were measured with toy .*the passage is of toy.*calibrate --blend"):
            FOUND.notes(other, "mean", 4)


@pytest.mark.parametrize(
    ("base", "contexts", "said"),
    [
        ("mean", 2, "the mean over 2 contexts: .*means over 4"),
        ("alone", 0, "alone: .*--base alone"),
        ("behind", 0, "one behind another text: .*--base behind"),
    ],
)
def test_passages_that_were_computed_otherwise_are_refused(base, contexts, said):
    with pytest.raises(UsageError, match=rf"the mean over 4 contexts, the passage is computed as {said}"):
        FOUND.notes(SPEC, base, contexts)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "kvabr.fusion/9"},
        {"losses": []},
        {"losses": [[0.1, -1]]},
        {"losses": [[0.1, 1], [0.1, 2]]},
        {"losses": [["x", 1]]},
        {"losses": 3},
        {"contexts": "4"},
        {"spec": {}},
        {"spec": None},
        {"method": 3},
        {"base": 3},
        {"base": ""},
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path, change):
    path = tmp_path / "toy.json"
    path.write_text(json.dumps(FOUND.to_json() | change))
    with pytest.raises(FormatError, match=r"toy\.json: .*`kvabr calibrate --blend` writes such files"):
        FusionLosses.read(path)


def test_neither_is_junk_nor_nothing(tmp_path):
    path = tmp_path / "toy.json"
    for junk in ("", "[]", "{", "3", "null"):
        path.write_text(junk)
        with pytest.raises(FormatError, match="fusion losses: "):
            FusionLosses.read(path)
    with pytest.raises(AssetError, match="nowhere"):
        FusionLosses.read(tmp_path / "nowhere.json")
