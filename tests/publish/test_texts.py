"""Texts for calibration and measurement: always there, and never the same ones."""

from __future__ import annotations

from kvabr.publish.texts import calibration_texts, measuring_texts


def test_there_is_enough_of_both():
    assert sum(map(len, calibration_texts().values())) > 200_000
    assert all(len(text) > 8_000 for text in measuring_texts().values())
    assert {"manual", "source"} <= measuring_texts().keys()


def test_no_text_is_in_both():
    """Not a paragraph of any length that matters, however it is laid out."""

    def paragraphs(texts):
        plain = [" ".join(part.split()) for text in texts.values() for part in text.split("\n\n")]
        return {part for part in plain if len(part) > 160}

    assert len(paragraphs(measuring_texts())) > 300
    assert not paragraphs(calibration_texts()) & paragraphs(measuring_texts())
