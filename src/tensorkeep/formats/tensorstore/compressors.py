"""The compressors of zarr v2 and v3 that TensorStore has, by one name each, with an optional level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tensorkeep.errors import UsageError

AS_DOCUMENTED = "as-documented"
"""The key ``compressor`` left out of zarr v2 metadata: not "no compression", but TensorStore's default, Blosc-LZ4."""

_BLOSC = tuple(f"blosc-{name}" for name in ("lz4", "lz4hc", "zstd", "zlib", "snappy", "blosclz"))
_LEVELS = {
    "gzip": range(10),
    "zlib": range(10),
    "zstd": range(-131072, 23),
    "bz2": range(1, 10),
    **dict.fromkeys(_BLOSC, range(10)),
}
KNOWN = {2: ("gzip", "zlib", "zstd", "bz2", *_BLOSC), 3: ("gzip", "zstd", *_BLOSC)}
"""What TensorStore takes, by zarr version."""

_CHECKS = {"gzip": "CRC-32 of every chunk", "zlib": "Adler-32 of every chunk", "bz2": "CRC-32 of every chunk"}


@dataclass(frozen=True, slots=True)
class Compressor:
    """A compressor by its name here, and its level, or None for TensorStore's default."""

    name: str
    level: int | None = None

    def zarr2(self) -> dict[str, Any]:
        """Return the value of ``compressor`` in zarr v2 metadata."""
        name, _, inner = self.name.partition("-")
        if inner:
            return {"id": name, "cname": inner} | ({} if self.level is None else {"clevel": self.level})
        return {"id": name} | ({} if self.level is None else {"level": self.level})

    def zarr3(self) -> dict[str, Any]:
        """Return the codec in zarr v3 metadata."""
        name, _, inner = self.name.partition("-")
        if inner:
            return {"name": name, "configuration": {"cname": inner} | self._level("clevel")}
        return {"name": name} | ({"configuration": self._level("level")} if self.level is not None else {})

    def _level(self, key: str) -> dict[str, int]:
        return {} if self.level is None else {key: self.level}


def parse(compressor: object, zarr: int) -> Compressor | str | None:
    """Return what the option ``compressor`` means: a compressor, `AS_DOCUMENTED`, or None for raw chunks.

    Raises
    ------
    UsageError
        If it means nothing for this version of zarr.
    """
    if compressor is None or compressor == "none":
        return None
    known = ", ".join(["None", *([AS_DOCUMENTED] if zarr == 2 else []), *KNOWN[zarr]])
    if compressor == AS_DOCUMENTED:
        if zarr != 2:
            raise UsageError(
                f"compressor={AS_DOCUMENTED!r} leaves a key out of zarr v2 metadata; zarr v3 without codecs is raw",
                remedy=f"give zarr=2, or choose one of: {known}",
            )
        return AS_DOCUMENTED
    name, colon, level = compressor.partition(":") if isinstance(compressor, str) else ("", "", "")
    if name not in KNOWN[zarr]:
        raise UsageError(
            f"zarr v{zarr} arrays have no compressor {compressor!r}",
            remedy=f'choose one of: {known}; some with a level, as in "zstd:1"',
        )
    return Compressor(name, _level(name, level) if colon else None)


def _level(name: str, text: str) -> int:
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


def check_of(metadata: dict[str, Any]) -> str | None:
    """Return what a reader of an array finds changed bytes by, from its zarr metadata; None where there is nothing."""
    if metadata.get("zarr_format") == 2 or "compressor" in metadata:
        compressor = metadata.get("compressor") or {}
        return _CHECKS.get(compressor.get("id", ""))
    return _check_of_codecs(metadata.get("codecs") or [])


def _check_of_codecs(codecs: list[dict[str, Any]]) -> str | None:
    names = [codec.get("name") for codec in codecs]
    if "crc32c" in names:
        return "CRC-32C of every chunk"
    for codec in codecs:
        configuration = codec.get("configuration") or {}
        if codec.get("name") == "sharding_indexed":
            return _check_of_codecs(configuration.get("codecs") or [])
        if codec.get("name") == "gzip":
            return _CHECKS["gzip"]
        if codec.get("name") == "zstd" and configuration.get("checksum"):
            return "XXH64 of every chunk"
    return None


def codec_of(metadata: dict[str, Any]) -> str:
    """Return how an array's chunks are compressed, in one word, from its zarr metadata; ``"raw"`` if they are not."""
    compressor = metadata.get("compressor")
    if compressor:
        return _word(compressor["id"], compressor)
    return _codec_among(metadata.get("codecs") or [])


def _codec_among(codecs: list[dict[str, Any]]) -> str:
    for codec in codecs:
        configuration = codec.get("configuration") or {}
        if codec["name"] == "sharding_indexed":
            return _codec_among(configuration.get("codecs") or [])
        if codec["name"] in ("gzip", "zstd", "blosc"):
            return _word(codec["name"], configuration)
    return "raw"


def _word(name: str, configuration: dict[str, Any]) -> str:
    inner = configuration.get("cname")
    return f"{name}-{inner}" if inner else name
