"""Runs: neighbours that are alike and lie at equal distances, so that one kernel does what each of them needs.

The experts of a layer are tensors of their own by name. In the trainer, in an area and in the engine they are slices of
one piece of memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch


def find_runs(kinds: Sequence[Hashable], *places: Sequence[int]) -> list[range]:
    """Cut items into runs: neighbours of one kind that are equally far apart.

    Args:
        kinds: of the items: equal where they are alike.
        places: of the items, in one memory or in several; within each, all members of a run are the same distance after
            the one before.

    Returns:
        The indices of each run's members, in order.
    """
    runs: list[range] = []
    first = 0
    while first < len(kinds):
        end, steps = first + 1, [0] * len(places)
        if end < len(kinds):
            steps = [place[end] - place[first] for place in places]
        if all(step > 0 for step in steps):
            while (
                end < len(kinds)
                and kinds[end] == kinds[first]
                and all(place[end] - place[end - 1] == step for place, step in zip(places, steps, strict=True))
            ):
                end += 1
        runs.append(range(first, end))
        first = end
    return runs


def stack_run(members: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """The memory of a run's members: ``[count, *shape of a member]``.

    Args:
        members: the first two, or the only one.
        count: of all members.
    """
    first = members[0]
    step = members[1].data_ptr() - first.data_ptr() if count > 1 else first.nbytes
    return first.as_strided((count, *first.shape), (step // first.element_size(), *first.stride()))


def memory_kind(tensor: torch.Tensor) -> Hashable:
    """What members of a run have in common as memory."""
    return tensor.untyped_storage().data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
