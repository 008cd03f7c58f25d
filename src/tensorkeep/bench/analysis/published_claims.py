"""The published claims that the bench checks, as data: the figures, and the arms that isolate their causes.

The claims come from the comparison of three, then six ways to checkpoint OpenLLaMA-3B that this bench grew out of; each
figure is one entry. The experiment ``claims`` describes and runs the arms.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorkeep.bench.results import Claim


@dataclass(frozen=True, slots=True)
class ArmPair:
    """One arm against another in one measure; they may differ only in the settings ``changed``, if it is given."""

    measure: str
    over: str
    arm: str
    changed: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class PublishedClaim:
    """One figure of a claim.

    Attributes
    ----------
    id, claim, theirs : str
    gain : tuple of float
        Lowest and highest claimed gain, most often the same: how many times better the arm is.
    documented : ArmPair
        The comparison as it was made there.
    isolating : tuple of ArmPair
        Arms that differ only in what the claim names.
    also : tuple of ArmPair
        Shown beside them, without influence on the verdict.
    mixed : str
        What else differs, even between the isolating arms; empty if nothing does.
    wrong : str
        The error in the claim, or in how it was measured.
    """

    id: str
    claim: str
    theirs: str
    gain: tuple[float, float]
    documented: ArmPair
    isolating: tuple[ArmPair, ...]
    also: tuple[ArmPair, ...] = ()
    mixed: str = ""
    wrong: str = ""


_COMPRESSOR = frozenset({"compressor"})
_CHUNKS = frozenset({"chunk", "chunking"})
_CONCURRENCY = frozenset({"concurrency"})

_CONVERTED = "the conversion of float16 to float32 and back was timed as storage"
_OMITTED = "the arm without a compressor was compressed: omitting the key gives Blosc-LZ4"
_UNSYNCED = "TensorStore syncs to the disk, torch.save does not: `save` includes the sync of both"
_CACHED = "the loads came from the page cache; seconds of other hardware do not carry over, ratios may"


def _gain(before: float, after: float) -> tuple[float, float]:
    return before / after, before / after


def _one(measure: str, over: str, arm: str, changed: frozenset[str] | None = None) -> tuple[ArmPair, ...]:
    return (ArmPair(measure, over, arm, changed),)


def _chunks(measure: str) -> tuple[ArmPair, ...]:
    return (
        ArmPair(measure, "tensorstore-raw", "tensorstore-chunks", _CHUNKS),
        ArmPair(measure, "tensorstore-concurrency-1", "tensorstore-chunks-concurrency-1", _CHUNKS),
    )


def _concurrency(measure: str) -> tuple[ArmPair, ...]:
    return _one(measure, "tensorstore-concurrency-1", "tensorstore-concurrency-128", _CONCURRENCY)


def _more_concurrency(measure: str) -> tuple[ArmPair, ...]:
    return (
        ArmPair(measure, "tensorstore-raw", "tensorstore-concurrency-128", _CONCURRENCY),
        ArmPair(measure, "tensorstore-chunks-concurrency-1", "tensorstore-chunks-concurrency-128", _CONCURRENCY),
    )


def _gzip(measure: str) -> tuple[ArmPair, ...]:
    return _one(measure, "tensorstore-raw", "tensorstore-gzip", _COMPRESSOR)


CLAIMS: tuple[PublishedClaim, ...] = (
    PublishedClaim(
        "1a",
        "T5X takes 9.3 times as long as PyTorch to save",
        "61.8 s against 6.66 s",
        _gain(6.659, 61.771),
        ArmPair("returned", "pytorch", "t5x"),
        _one("save", "pytorch", "t5x"),
        mixed=_CONVERTED,
        wrong=_UNSYNCED,
    ),
    PublishedClaim(
        "1b",
        "T5X takes 7.9 times as long as PyTorch to load",
        "26.2 s against 3.32 s",
        _gain(3.322, 26.192),
        ArmPair("load_warm", "pytorch", "t5x"),
        _one("load_cold", "pytorch", "t5x"),
        mixed=_CONVERTED,
        wrong=_CACHED,
    ),
    PublishedClaim(
        "1c",
        "basic TensorStore takes 20 times as long as PyTorch to save",
        "134 s against 6.66 s",
        _gain(6.659, 134.369),
        ArmPair("returned", "pytorch", "tensorstore"),
        _one("save", "pytorch", "tensorstore"),
        _one("returned", "pytorch", "tensorstore-no-sync"),
        mixed=_CONVERTED,
        wrong=_UNSYNCED,
    ),
    PublishedClaim(
        "1d",
        "basic TensorStore takes 5.8 times as long as PyTorch to load",
        "19.3 s against 3.32 s",
        _gain(3.322, 19.283),
        ArmPair("load_warm", "pytorch", "tensorstore"),
        _one("load_cold", "pytorch", "tensorstore"),
        mixed=_CONVERTED,
        wrong=_CACHED,
    ),
    PublishedClaim(
        "2",
        "T5X saves 54% faster than basic TensorStore",
        "61.8 s against 134 s",
        _gain(134.369, 61.771),
        ArmPair("save", "tensorstore", "t5x"),
        (),
        (
            ArmPair("save", "tensorstore-raw", "tensorstore-chunks", _CHUNKS),
            *_concurrency("save"),
            ArmPair("save", "tensorstore", "tensorstore-gzip", _COMPRESSOR),
        ),
        mixed="chunks, concurrency and compressor change at once",
        wrong=_OMITTED,
    ),
    PublishedClaim(
        "3a",
        "larger chunks alone take 52.6% off the time to save",
        "67.9 s against 143 s",
        _gain(143.118, 67.890),
        ArmPair("save", "tensorstore", "tensorstore-chunks-concurrency-1"),
        _chunks("save"),
        wrong=_OMITTED,
    ),
    PublishedClaim(
        "3b",
        "larger chunks alone add 22% to the time to load",
        "21.5 s against 17.5 s",
        _gain(17.530, 21.450),
        ArmPair("load_warm", "tensorstore", "tensorstore-chunks-concurrency-1"),
        _chunks("load_warm"),
        wrong=_OMITTED,
    ),
    PublishedClaim(
        "4a",
        "concurrency 128 alone takes 31% off the time to save",
        "98.5 s against 143 s",
        _gain(143.118, 98.450),
        ArmPair("save", "tensorstore", "tensorstore-concurrency-128"),
        _concurrency("save"),
        _more_concurrency("save"),
        wrong="the default concurrency is not 1, and arrays were written one after the other, so that 128 could only "
        "help within one array",
    ),
    PublishedClaim(
        "4b",
        "concurrency 128 alone takes 5% off the time to load",
        "16.7 s against 17.5 s",
        _gain(17.530, 16.680),
        ArmPair("load_warm", "tensorstore", "tensorstore-concurrency-128"),
        _concurrency("load_warm"),
        _more_concurrency("load_warm"),
        wrong="one run each: equal runs differ by more than 5%",
    ),
    PublishedClaim(
        "5a",
        "gzip alone adds 1.8% to the time to save",
        "146 s against 143 s",
        _gain(143.118, 145.670),
        ArmPair("save", "tensorstore", "tensorstore-gzip-concurrency-1"),
        _gzip("save"),
        wrong=_OMITTED,
    ),
    PublishedClaim(
        "5b",
        "gzip alone adds 42% to the time to load",
        "24.9 s against 17.5 s",
        _gain(17.530, 24.890),
        ArmPair("load_warm", "tensorstore", "tensorstore-gzip-concurrency-1"),
        _gzip("load_warm"),
        wrong=_OMITTED,
    ),
    PublishedClaim(
        "5c",
        "gzip alone makes files 2 to 5% smaller",
        "2.52 GiB against 2.58 GiB",
        (1 / 0.98, 1 / 0.95),
        ArmPair("stored", "tensorstore", "tensorstore-gzip-concurrency-1"),
        _gzip("stored"),
        wrong=_OMITTED,
    ),
    PublishedClaim(
        "6",
        "TensorStore's files are 5.5% smaller than PyTorch's, \"without compression\"",
        "2.58 GiB against 2.73 GiB",
        _gain(2.73, 2.58),
        ArmPair("stored", "pytorch", "tensorstore"),
        _one("stored", "pytorch", "tensorstore-keep-dtype"),
        _one("stored", "pytorch", "tensorstore-raw"),
        wrong=f"{_OMITTED}; PyTorch's format has no compression; float32 doubles the bytes",
    ),
)
"""All claims that checkpoints can answer."""

ARMS_NEEDED = frozenset(
    name
    for claim in CLAIMS
    for pair in (claim.documented, *claim.isolating, *claim.also)
    for name in (pair.over, pair.arm)
)
"""Names of the arms that the claims are checked with."""

NOT_HERE = Claim(
    id="7",
    claim="8-bit optimizer and activation checkpointing give 6.14x and 11.15x the throughput, "
    "64.8% and 78.1% less memory",
    theirs="small model with batch 256; GPT-2 with batch 32",
    ours="",
    verdict="not run",
    reason="checkpoints cannot answer it: measure it with `tensorkeep bench training`",
)
"""The claim about training, which no arm here checks."""
