"""TensorStore's compressors for zarr v2 and v3: options, metadata, checksums."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tensorkeep.errors import UsageError

AS_DOCUMENTED = "as-documented"
"""Leaves the key ``compressor`` out of zarr v2 metadata: TensorStore then compresses with Blosc-LZ4."""

_BLOSC = tuple(f"blosc-{name}" for name in ("lz4", "lz4hc", "zstd", "zlib", "snappy", "blosclz"))
_LEVELS = {
    "gzip": range(10),
    "zlib": range(10),
    "zstd": range(-131072, 23),
    "bz2": range(1, 10),
    **dict.fromkeys(_BLOSC, range(10)),
}
KNOWN = {2: ("gzip", "zlib", "zstd", "bz2", *_BLOSC), 3: ("gzip", "zstd", *_BLOSC)}
"""The names by zarr version."""

_CHECKS = {"gzip": "CRC-32 of every chunk", "zlib": "Adler-32 of every chunk", "bz2": "CRC-32 of every chunk"}


@dataclass(frozen=True, slots=True)
class Compressor:
    """A compressor by its name in `KNOWN`, and its level, or None for TensorStore's default."""

    name: str
    level: int | None = None

    def zarr2(self) -> dict[str, Any]:
        """Return the value of ``compressor`` in zarr v2 metadata."""
        return {"id": self.name.partition("-")[0]} | self._configuration()

    def zarr3(self) -> dict[str, Any]:
        """Return the codec in zarr v3 metadata."""
        configuration = self._configuration()
        return {"name": self.name.partition("-")[0]} | ({"configuration": configuration} if configuration else {})

    def _configuration(self) -> dict[str, Any]:
        inner = self.name.partition("-")[2]
        level = {} if self.level is None else {"clevel" if inner else "level": self.level}
        return {"cname": inner} | level if inner else level


def parse_compressor(compressor: str | None, zarr: int) -> Compressor | str | None:
    """Return what the option ``compressor`` stands for: a `Compressor`, `AS_DOCUMENTED`, or None for raw chunks.

    Raises UsageError if this version of zarr has no such compressor or level.

    Examples
    --------
    >>> parse_compressor("zstd:1", 3)
    Compressor(name='zstd', level=1)
    """
    if compressor is None or compressor == "none":
        return None
    known = ", ".join(["None", *([AS_DOCUMENTED] if zarr == 2 else []), *KNOWN[zarr]])
    if compressor == AS_DOCUMENTED:
        if zarr == 2:
            return AS_DOCUMENTED
        raise UsageError(
            f"compressor={AS_DOCUMENTED!r} exists for zarr v2 only",
            remedy=f"give zarr=2, or choose one of: {known}",
        )
    name, colon, level = compressor.partition(":")
    if name not in KNOWN[zarr]:
        raise UsageError(
            f"zarr v{zarr} arrays have no compressor {compressor!r}",
            remedy=f'choose one of: {known}; some with a level, as in "zstd:1"',
        )
    return Compressor(name, _parse_level(name, level) if colon else None)


def _parse_level(name: str, text: str) -> int:
    allowed = _LEVELS[name]
    try:
        level = int(text)
    except ValueError:
        level = allowed.start - 1
    if level not in allowed:
        raise UsageError(
            f"compressor {name} has no level {text!r}", remedy=f"give {allowed.start} to {allowed.stop - 1}"
        )
    return level


def checksum_of(metadata: dict[str, Any]) -> str | None:
    """Return the checksum that covers an array's chunks, from its zarr metadata; None without one."""
    if "codecs" not in metadata:
        return _CHECKS.get((metadata.get("compressor") or {}).get("id", ""))
    codecs = dict(_codecs(metadata["codecs"]))
    if "crc32c" in codecs:
        return "CRC-32C of every chunk"
    if codecs.get("zstd", {}).get("checksum"):
        return "XXH64 of every chunk"
    return _CHECKS["gzip"] if "gzip" in codecs else None


def codec_of(metadata: dict[str, Any]) -> str:
    """Return the codec of an array's chunks in one word, from its zarr metadata; ``"raw"`` without compression."""
    compressor = metadata.get("compressor")
    found = {compressor["id"]: compressor} if compressor else dict(_codecs(metadata.get("codecs") or []))
    for name in found.keys() & {"blosc", "bz2", "gzip", "zlib", "zstd"}:
        inner = found[name].get("cname")
        return f"{name}-{inner}" if inner else name
    return "raw"


def _codecs(codecs: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the configuration of each zarr v3 codec, with those inside of shards."""
    for codec in codecs:
        configuration = codec.get("configuration") or {}
        yield codec["name"], configuration
        if codec["name"] == "sharding_indexed":
            yield from _codecs(configuration.get("codecs") or [])
