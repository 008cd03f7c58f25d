"""The coder of byte planes: a C extension, or numpy and Zstandard without it or with ``TENSORKEEP_CODER=python``."""

from collections.abc import Sequence

import numpy as np
import zstandard

from tensorkeep.codecs import bitplanes
from tensorkeep.codecs.base import Bytes, CodecError, append
from tensorkeep.codecs.zstd import check_frame
from tensorkeep.errors import UnsupportedError, UsageError
from tensorkeep.variables import read_variable

try:
    from tensorkeep.codecs import _coder as compiled
except ImportError:
    compiled = None  # type: ignore[assignment]

_VARIABLE = "TENSORKEEP_CODER"
_required = read_variable(_VARIABLE)
if _required not in ("", "compiled", "python"):
    raise UsageError(f"{_VARIABLE}={_required!r} is not a coder", remedy="set it to compiled or python, or unset it")
if _required == "compiled" and compiled is None:
    raise UnsupportedError(
        f"{_VARIABLE}=compiled, but this installation has no compiled coder",
        remedy="install tensorkeep where a C compiler is, or unset the variable",
    )
if _required == "python":
    compiled = None  # type: ignore[assignment]
# A checkout may hold an extension that was built before its sources changed.
if compiled is not None and getattr(compiled, "INTERFACE", None) != 1:
    raise UnsupportedError(
        "the compiled coder was built from other sources than this Tensorkeep",
        remedy="install again (in a clone: pip install ./packages/tensorkeep), or set TENSORKEEP_CODER=python",
    )


# The most elements of a run, which is the most bytes of one plane's frame.
RUN = 262_144


class PythonCoder:
    """Splits runs into planes and codes the planes, for one thread."""

    def __init__(self) -> None:
        # Matches of at least seven bytes in a table of 64 entries: zstd finds almost none, spends almost no time on the
        # search, and only Huffman-codes.
        parameters = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            target_length=0,  # with more, zstd does not code literals
            min_match=7,
            hash_log=6,
            chain_log=6,
            search_log=1,
            window_log=18,
        )
        self._compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=RUN)
        self._scratch = bitplanes.Scratch(RUN)

    def split(
        self, run: bitplanes.Words, planes: Sequence[Bytes], layout: int, copy: bitplanes.Words | None = None
    ) -> None:
        """Write byte k of every word to plane k, from ``copy`` if that is given: other threads may change the words."""
        if copy is not None:
            np.copyto(copy, run)
            run = copy
        bitplanes.split(run, planes, layout, self._scratch)

    def merge(self, planes: Sequence[Bytes], run: bitplanes.Words, layout: int, *, xor: bool = False) -> None:
        """Fill the words from their planes, or XOR the planes into the words."""
        # The planes of a difference are merged beside the old words, and then applied in one pass.
        merged = np.empty_like(run) if xor else run
        bitplanes.merge(planes, merged, layout, self._scratch)
        if xor:
            np.bitwise_xor(run, merged, out=run)

    def coded_size(self, sample: Bytes) -> int:
        """Estimate how many bytes a coded sample of a plane takes."""
        return len(self._compressor.compress(sample.data))

    def encode(self, number: int, plane: Bytes, out: Bytes, *, first: bool) -> int:
        """Write a plane of one run to the front of ``out``, of at least `zstd_bound`, as a frame; return its length."""
        return append(self._compressor.compress(plane.data), out, 0)

    def decode(self, number: int, frame: Bytes, count: int) -> Bytes:
        """Return the ``count`` bytes of a plane, valid until its next call; CodecError if the frame is damaged."""
        # Before the decoder sees it: a hostile frame may declare any size.
        check_frame(frame, count, window=RUN)
        try:
            return np.frombuffer(self._decompressor.decompress(frame.data, allow_extra_data=False), np.uint8)
        except zstandard.ZstdError as error:
            raise CodecError(f"a damaged Zstandard frame: {error}") from None


class CompiledCoder(PythonCoder):
    """The coder of the C extension; Zstandard decodes the frames that the extension cannot."""

    def __init__(self) -> None:
        super().__init__()
        self._encoders: dict[int, Bytes] = {}
        self._decoders: dict[int, tuple[Bytes, Bytes]] = {}

    def split(
        self, run: bitplanes.Words, planes: Sequence[Bytes], layout: int, copy: bitplanes.Words | None = None
    ) -> None:
        compiled.split(run, tuple(planes), layout, copy)

    def merge(self, planes: Sequence[Bytes], run: bitplanes.Words, layout: int, *, xor: bool = False) -> None:
        compiled.merge(tuple(planes), run, layout, xor)

    def coded_size(self, sample: Bytes) -> int:
        return compiled.coded_size(sample)

    def encode(self, number: int, plane: Bytes, out: Bytes, *, first: bool) -> int:
        # Kept for the next run of this plane, with the Huffman codes of the previous frame.
        if number not in self._encoders:
            self._encoders[number] = np.zeros(compiled.ENCODER_BYTES, np.uint8)
        return compiled.encode_frame(self._encoders[number], plane, out, first)

    def decode(self, number: int, frame: Bytes, count: int) -> Bytes:
        if number not in self._decoders:
            self._decoders[number] = np.zeros(compiled.DECODER_BYTES, np.uint8), np.empty(RUN, np.uint8)
        decoder, memory = self._decoders[number]
        plane = memory[:count]
        # Zstandard also decodes frames that the extension finds damaged: its messages say what is wrong.
        return plane if compiled.decode_frame(decoder, frame, plane) else super().decode(number, frame, count)


# Each coder reads what the other wrote: a plane is a Zstandard frame, which as a rule is only Huffman-coded. The
# extension chooses the Huffman codes of a run of 256 KiB by a sample. If the codes of the previous frame are about as
# good, it keeps them, so that a reader need not build its tables again.
INSTALLED: type[PythonCoder] = CompiledCoder if compiled else PythonCoder


def describe() -> str:
    """Return which coder is in use, for people."""
    if compiled:
        return f"compiled ({compiled.simd})"
    reason = f"{_VARIABLE}=python" if _required == "python" else "no compiled coder"
    return f"Python ({reason}: numpy + zstandard)"
