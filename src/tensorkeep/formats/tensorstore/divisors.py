"""The divisors of a dimension's length, found by factoring it, so that a large prime costs no more than 2**30 does."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import gcd

_TRIAL = 2000
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
"""With these bases the test of Miller and Rabin errs for no number below 3.3e24."""


@lru_cache(maxsize=256)
def divisors(number: int) -> tuple[int, ...]:
    """Return every divisor of a positive number, ascending."""
    found = [1]
    for prime, power in Counter(_prime_factors(number)).items():
        found = [known * prime**exponent for known in found for exponent in range(power + 1)]
    return tuple(sorted(found))


def _prime_factors(number: int) -> list[int]:
    found = []
    for prime in range(2, _TRIAL):
        while number % prime == 0:
            found.append(prime)
            number //= prime
    waiting = [number] if number > 1 else []
    while waiting:
        part = waiting.pop()
        if _is_prime(part):
            found.append(part)
        else:
            factor = _factor(part)
            waiting += [factor, part // factor]
    return found


def _is_prime(number: int) -> bool:
    """Say whether an odd number without small factors is prime (Miller and Rabin's test)."""
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(number, witness, odd, twos) for witness in _WITNESSES)


def _passes(number: int, witness: int, odd: int, twos: int) -> bool:
    power = pow(witness, odd, number)
    if witness % number == 0 or power in (1, number - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False


def _factor(number: int) -> int:
    """Return a proper factor of a composite number (Pollard's rho)."""
    step = 1
    while True:
        slow = fast = 2
        factor = 1
        while factor == 1:
            slow = (slow * slow + step) % number
            fast = (fast * fast + step) % number
            fast = (fast * fast + step) % number
            factor = gcd(abs(slow - fast), number)
        if factor != number:
            return factor
        step += 1
