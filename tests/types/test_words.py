"""Words for counts and places."""

from __future__ import annotations

from kvabr.types.words import ordinal


def test_places_are_said_as_people_say_them():
    said = [ordinal(number) for number in (1, 2, 3, 4, 11, 12, 13, 21, 101, 112, 1003)]
    assert said == ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "101st", "112th", "1,003rd"]
