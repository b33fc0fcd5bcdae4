"""Groups that are sampled to be logged."""

from __future__ import annotations

from collections import Counter

from monarch_rl.episode.shard import sample_groups


def test_all_groups_are_sampled_equally_often() -> None:
    """2 of 8 groups in 4,000 samples: each is sampled 1,000 times, with a standard deviation of 27."""
    counts = Counter(place for step in range(4000) for place in sample_groups(8, 2, f"seed/{step}"))
    assert sorted(counts) == list(range(8)) and sum(counts.values()) == 8000
    assert max(abs(count - 1000) for count in counts.values()) < 5 * 27
    assert sample_groups(8, 2, "seed/1") == sample_groups(8, 2, "seed/1")
