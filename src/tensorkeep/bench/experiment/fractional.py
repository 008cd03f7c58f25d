"""Fractional two-level designs for 6 to 15 factors, and their aliased effects.

Some *basic* factors take every combination of their levels. Each other factor takes the parity of some of them, its
*generator*. All designs have resolution IV: a main effect is never aliased with another main effect or with an
interaction of two factors, but interactions of two factors are aliased with each other. The generators for up to 10
factors have minimum aberration (Montgomery, *Design and Analysis of Experiments*, table of 2^(k-p) designs). The others
are words of odd length, which give resolution IV by themselves.
"""

import itertools
from collections.abc import Sequence

MOST_FACTORS = 15

_ODD_WORDS = "ABC BCD CDE ACD ADE BDE ABD ABE ACE BCE"
_GENERATORS = {
    6: "ABC BCD",
    7: "ABC BCD ACD",
    8: "BCD ACD ABC ABD",
    9: "BCDE ACDE ABDE ABCE",
    10: "ABCD ABCE ABDE ACDE BCDE",
}


def columns(factors: int) -> list[int]:
    """Return the generator of each of 6 to 15 factors, as a bit set of the basic ones: the first four or five."""
    basic = 4 if factors <= 8 else 5
    words = _GENERATORS.get(factors, _ODD_WORDS).split()[: factors - basic]
    return [1 << place for place in range(basic)] + [
        sum(1 << "ABCDE".index(letter) for letter in word) for word in words
    ]


def fraction(factors: int) -> list[tuple[int, ...]]:
    """Return the points of the design, 16 for up to 8 factors, else 32: the level, 0 or 1, of each factor.

    The first point has level 0 throughout.
    """
    bits = columns(factors)
    points = 1 << (4 if factors <= 8 else 5)
    return [tuple((point & column).bit_count() & 1 for column in bits) for point in range(points)]


def alias_groups(names: Sequence[str]) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Return the groups of effects, of one factor or of two, that the design for these factors cannot separate.

    A group has two effects or more; an effect is the tuple of its factors.
    """
    bits = dict(zip(names, columns(len(names)), strict=True))
    groups: dict[int, list[tuple[str, ...]]] = {}
    for effect in [*((name,) for name in names), *itertools.combinations(names, 2)]:
        column = 0
        for name in effect:
            column ^= bits[name]
        groups.setdefault(column, []).append(effect)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)
