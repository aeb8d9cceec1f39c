"""The picture of the house in CONTRIBUTING.md is of the code as it is."""

from __future__ import annotations

from tools.house_picture import PAGE, page


def test_the_picture_shows_the_rooms_of_now():
    assert PAGE.read_text() == page(), "python -m tools.house_picture"
