"""Lists of ranks in messages of the Python side."""

from __future__ import annotations

from mooncake_backend.ranks import MOST_LISTED, list_ranks, name_ranks


def test_runs_of_three_and_more_are_joined():
    assert list_ranks([]) == ""
    assert list_ranks([3]) == "3"
    assert list_ranks([4, 3]) == "3, 4"
    assert list_ranks([0, 1, 2, 3, 7, 9, 10, 11]) == "0-3, 7, 9-11"
    assert list_ranks(range(1024)) == "0-1023"
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([5, 3]) == "ranks 3, 5"


def test_a_long_list_says_how_many_it_leaves_out():
    text = list_ranks(range(0, 2048, 2))
    assert MOST_LISTED - 10 < len(text) <= MOST_LISTED
    assert text.endswith(f", and {1024 - text.count(',')} more")
