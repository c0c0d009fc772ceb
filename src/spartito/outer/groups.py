"""Which replicas make a group, and when groups meet. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from spartito.errors import UserError
from spartito.names import divisors, nearest, plural
from spartito.numeric import is_whole

Asked = int | str | Sequence[Sequence[int]]
"""What a strategy's ``groups`` may be."""
Members = tuple[tuple[int, ...], ...]
"""The ranks of each group, in rising order; the groups in the order of their first rank."""
Sites = int | Sequence[Sequence[int]] | None
"""What a strategy's ``sites`` may be."""

MACHINE = "machine"
"""Each machine is a group."""
TOKENS, EQUAL = WEIGHTS = ("tokens", "equal")
"""What a group counts for when models are merged: what it has trained on, or as much as others."""


def groups_of(
    asked: Asked, machines: Sequence[Sequence[int]], tasks: int, of: str = "replica"
) -> Members:
    """The groups of a job.

    Args:
        asked: A number of groups of neighbours, their members, or "machine".
        machines: The ranks of each machine, for "machine".
        tasks: The replicas of the job.
        of: What an error calls one of them; replicas have ranks, all others an index.

    Returns:
        The ranks of each group.

    Raises:
        UserError: They do not divide the replicas, or one has no members.
    """
    if isinstance(asked, str):
        if asked != MACHINE:
            raise UserError(f"groups={asked!r}", nearest(asked, [MACHINE]))
        return _sorted(machines)
    if is_whole(asked):
        return _divided(asked, tasks, "group", of)
    return _listed(asked, tasks, "group", of, "rank" if of == "replica" else of)


def check_alike(members: Members) -> None:
    """Refuse groups that cannot have a model each in as many shards as the others.

    Args:
        members: The ranks of each group.

    Raises:
        UserError: They are not of one size.
    """
    if len(sizes := sorted({len(group) for group in members})) > 1:
        raise UserError(
            f"groups of {' and '.join(map(str, sizes))} tasks that have a model between them: the "
            "first ones of all groups have the same part, and so on",
            "Take groups of one size, or leave inside out.",
        )


def sites_of(asked: Sites, groups: int) -> Members:
    """The sites of a job, whose groups are neighbours.

    Args:
        asked: A number of sites, the numbers of the groups of each, or None.
        groups: How many groups there are.

    Returns:
        The numbers of the groups of each site; of none: empty.

    Raises:
        UserError: They do not divide the groups, or one has no groups.
    """
    if asked is None:
        return ()
    if is_whole(asked):
        found = _divided(asked, groups, "site", "group")
    else:
        found = _listed(asked, groups, "site", "group", "group")
    if len(found) == 1:
        raise UserError(f"sites={asked!r}: all groups are in one", "Leave it out.")
    return found


def _divided(asked: int, count: int, part: str, of: str) -> Members:
    if asked < 1 or count % asked:
        raise UserError(
            f"{part}s={asked} of {plural(count, of)}",
            f"It divides their number ({divisors(count)}); uneven ones are listed: "
            f"{part}s=[[0, 1], [2]].",
        )
    size = count // asked
    return tuple(tuple(range(g * size, (g + 1) * size)) for g in range(asked))


def _listed(asked: object, count: int, part: str, of: str, number: str) -> Members:
    shape = f"{part}s={asked!r} of {count} {of}s"
    do = f"List the {number}s of each {part}: {part}s=[[0, 1], [2, 3]]."
    if not isinstance(asked, Sequence) or not all(
        isinstance(each, Sequence) and not isinstance(each, str) for each in asked
    ):
        raise UserError(shape, do)
    members = [one for each in asked for one in each]
    if not asked or not all(asked):
        raise UserError(f"{shape}: a {part} without members", do)
    if not all(map(is_whole, members)):
        raise UserError(f"{shape}: {number}s are whole numbers", do)
    if wrong := [one for one in members if not 0 <= one < count]:
        raise UserError(f"{shape}: there is no {number} {wrong[0]}", do)
    if twice := [one for one, times in Counter(members).items() if times > 1]:
        raise UserError(f"{shape}: {number} {twice[0]} is in more than one", do)
    if left := sorted(set(range(count)) - set(members)):
        raise UserError(f"{shape}: {number} {left[0]} is in none", do)
    return _sorted(asked)


def _sorted(groups: Sequence[Sequence[int]]) -> Members:
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def updates_between(every: object, sites: Sites) -> tuple[int, int]:
    """After how many updates groups meet: those of a site, and all.

    Args:
        every: One number, or with sites two.
        sites: Whether there are any: None is no.

    Returns:
        Both; the same without sites.

    Raises:
        UserError: They are no whole numbers above 0, or the second is no multiple of the first.
    """
    if sites is None:
        return _checked(every), _checked(every)
    do = "Neighbours meet after the first, all after the second, a multiple: every=[20, 200]."
    if not isinstance(every, Sequence) or isinstance(every, str) or len(every) != 2:
        raise UserError(f"every={every!r} with sites={sites!r}", do)
    near, far = map(_checked, every)
    if far <= near or far % near:
        raise UserError(f"every={every!r} with sites={sites!r}", do)
    return near, far


def _checked(every: object) -> int:
    if not is_whole(every) or every < 1:
        raise UserError(
            f"every={every!r}", "Groups meet after so many updates: 1 or more; 20 is a beginning."
        )
    return every


def check_weights(weights: object) -> None:
    """Refuse what says nothing of how groups count.

    Args:
        weights: What was asked for.

    Raises:
        UserError: It is not one of `WEIGHTS`.
    """
    if weights not in WEIGHTS:
        raise UserError(f"weights={weights!r}", nearest(str(weights), WEIGHTS))
