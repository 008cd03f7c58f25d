"""The chunk shape of an array: a limit on its size, and two algorithms that choose it.

``halving`` halves the largest dimension until a chunk is small enough, whether or not the result divides the array;
chunks at the edges are then padded. ``divisors``, as in T5X, takes the next smaller divisor of the dimension instead,
so that no chunk is padded; a dimension of prime length goes from full to 1 in one step.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import gcd, prod
from typing import Literal

from tensorkeep.errors import UsageError
from tensorkeep.units import parse_bytes

Shape = tuple[int, ...]
Algorithm = Literal["halving", "divisors"]


def chunk_shape(shape: Sequence[int], itemsize: int, chunk: int | str | None, algorithm: Algorithm) -> Shape:
    """Return the shape of an array's chunks.

    No length is below 1, nor above the array's unless the array is empty.

    Parameters
    ----------
    shape : sequence of int
        Of the array.
    itemsize : int
        Bytes of a stored element.
    chunk : int, str or None
        Elements per chunk (``262144``), bytes per chunk (``"64MiB"``), the length along each dimension (``"64"``), or
        None for one chunk.
    algorithm : str
        ``"halving"`` or ``"divisors"``, for limits of elements or bytes.

    Raises UsageError if ``chunk`` is none of these.

    Examples
    --------
    >>> chunk_shape((32000, 3200), 4, "64MiB", "halving")
    (4000, 3200)
    >>> chunk_shape((32000, 3), 4, "64", "halving")
    (64, 3)
    """
    full = tuple(max(1, length) for length in shape)
    if chunk is None:
        return full
    if isinstance(chunk, str) and re.fullmatch(r"[1-9]\d{0,17}", chunk):
        return tuple(min(int(chunk), length) for length in full)
    try:
        limit = parse_bytes(chunk)
    except UsageError:
        limit = 0
    if limit < 1:
        raise UsageError(
            f"the option chunk is {chunk!r}",
            remedy='give a number of elements (262144), a size ("64MiB"), a length for each dimension ("64"), or None',
        )
    return ALGORITHMS[algorithm](full, limit if isinstance(chunk, int) else limit // itemsize)


def halve(shape: Sequence[int], max_elements: int) -> Shape:
    """Return a chunk of at most so many elements, at least 1, by halving the first of the largest dimensions."""
    return _shrink(shape, max_elements, lambda length, _: length // 2)


def divide(shape: Sequence[int], max_elements: int) -> Shape:
    """Return a chunk of at most so many elements, at least 1, with lengths that divide the array's."""

    def next_divisor(length: int, axis: int) -> int:
        known = divisors(shape[axis])
        return known[bisect_left(known, length) - 1]

    return _shrink(shape, max_elements, next_divisor)


ALGORITHMS: dict[Algorithm, Callable[[Sequence[int], int], Shape]] = {"halving": halve, "divisors": divide}


def _shrink(shape: Sequence[int], max_elements: int, smaller: Callable[[int, int], int]) -> Shape:
    chunk = list(shape)
    while chunk and prod(chunk) > max(1, max_elements) and max(chunk) > 1:
        axis = chunk.index(max(chunk))
        chunk[axis] = smaller(chunk[axis], axis)
    return tuple(chunk)


@lru_cache(maxsize=256)
def divisors(number: int) -> tuple[int, ...]:
    """Return every divisor of a positive number, ascending; from its prime factors, so that large primes are fast.

    Examples
    --------
    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    found = [1]
    for prime, power in Counter(_prime_factors(number)).items():
        found = [known * prime**exponent for known in found for exponent in range(power + 1)]
    return tuple(sorted(found))


def _prime_factors(number: int) -> list[int]:
    found = []
    for prime in range(2, 2000):
        while number % prime == 0:
            found.append(prime)
            number //= prime
    waiting = [number] if number > 1 else []
    while waiting:
        part = waiting.pop()
        factor = part if _is_prime(part) else _proper_factor(part)
        if factor == part:
            found.append(part)
        else:
            waiting += [factor, part // factor]
    return found


def _is_prime(number: int) -> bool:
    """Return whether an odd number is prime (Miller-Rabin; with these bases exact below 3.3e24)."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        powers = [pow(base, odd << shift, number) for shift in range(twos)]
        if powers[0] != 1 and number - 1 not in powers:
            return False
    return True


def _proper_factor(number: int) -> int:
    """Return a factor of a composite number, neither 1 nor itself (Pollard's rho)."""
    for step in range(1, number):
        slow = fast = 2
        factor = 1
        while factor == 1:
            slow = (slow * slow + step) % number
            fast = (fast * fast + step) % number
            fast = (fast * fast + step) % number
            factor = gcd(abs(slow - fast), number)
        if factor != number:
            return factor
    raise AssertionError(f"{number} is prime")
