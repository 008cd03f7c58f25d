"""Frames made by hand, of which most are damaged: one block, whose fields can lie one at a time."""

import struct
from collections.abc import Iterator, Sequence
from typing import Any

MAGIC = bytes.fromhex("28b52ffd")
RAW, RLE, COMPRESSED, RESERVED = range(4)


def frame(count: int, *blocks: tuple[int, int, bytes], descriptor: int = 0xA0) -> bytes:
    """Return a frame that declares ``count`` bytes in a field of four, of blocks with a kind, a size and content."""
    body = b""
    for number, (kind, size, content) in enumerate(blocks):
        header = size << 3 | kind << 1 | (number == len(blocks) - 1)
        body += header.to_bytes(3, "little") + content
    return MAGIC + bytes([descriptor]) + struct.pack("<I", count) + body


def literals(
    count: int,
    tree: bytes,
    streams: Sequence[bytes],
    *,
    form: int | None = None,
    kind: int = 2,
    jumps: Sequence[int] | None = None,
    length: int | None = None,
    sequences: bytes = b"\0",
) -> tuple[int, int, bytes]:
    """Return a block of literals (RFC 8878, 3.1.1.3.1) of one stream or four."""
    form = form if form is not None else 0 if len(streams) == 1 else 1
    jumps = jumps if jumps is not None else [len(stream) for stream in streams[:-1]]
    content = tree + b"".join(struct.pack("<H", jump) for jump in jumps) + b"".join(streams)
    bits = 6 + 4 * form if form else 10
    fields = kind | form << 2 | count << 4 | (len(content) if length is None else length) << (4 + bits)
    block = fields.to_bytes((4 + 2 * bits) // 8, "little") + content + sequences
    return COMPRESSED, len(block), block


def direct(*weights: int, stated: int | None = None) -> bytes:
    """Return the description of a code by weights of four bits."""
    padded = [*weights, 0]
    pairs = [padded[i] << 4 | padded[i + 1] for i in range(0, len(weights), 2)]
    return bytes([127 + (len(weights) if stated is None else stated), *pairs])


# Symbols 0 and 1 with one bit each: a stream of n bits, behind which a 1 marks the end.
TWO = direct(1)
SEVEN = literals(7, TWO, [b"\xaa"])
STREAM = b"\x34\x12\x01"
FOUR = literals(64, TWO, [STREAM] * 4)
# A block may not be larger than what the frame declares.
FILL = (RLE, 100, b"x")


def accepted() -> Iterator[tuple[str, int, bytes]]:
    """Yield frames that every reader must read, with the length to which they decode."""
    yield "one stream", 7, frame(7, SEVEN)
    yield "four streams", 64, frame(64, FOUR)
    yield "an empty fourth stream", 106, frame(106, FILL, literals(6, TWO, [b"\x07"] * 3 + [b"\x01"]))
    yield "codes of eleven bits", 101, frame(101, FILL, literals(1, direct(*range(1, 12)), [b"\x00\x08"]))
    yield "a second block without a description", 14, frame(14, SEVEN, literals(7, b"", [b"\xaa"], kind=3))
    yield "an empty raw block", 7, frame(7, SEVEN, (RAW, 0, b""))
    yield "an empty run", 7, frame(7, SEVEN, (RLE, 0, b"x"))
    yield "a run of a whole block", 131_072, frame(131_072, (RLE, 131_072, b"x"))


def refused_fields() -> Iterator[tuple[str, int, bytes]]:
    """Yield frames with headers that lie, or that another reader may read but the C coder leaves to it."""
    good = frame(7, SEVEN)
    yield "nothing", 7, b""
    yield "a frame that declares more", 7, frame(8, SEVEN)
    yield "a frame that declares less", 7, frame(6, SEVEN)
    yield "a frame that declares four gigabytes", 7, frame(0xFFFFFFFF, SEVEN)
    yield "a longer output", 8, good
    yield "a shorter output", 6, good
    yield "no output", 0, good
    yield "a byte after the frame", 7, good + b"\0"
    yield "two frames", 14, good + good
    for bit in range(6):
        yield f"descriptor with bit {bit} changed", 7, frame(7, SEVEN, descriptor=0xA0 ^ 1 << bit)
    yield "no block", 0, frame(0)
    yield "no last block", 7, good[:9] + bytes([good[9] & ~1]) + good[10:]
    yield "a block of a kind that does not exist", 7, frame(7, (RESERVED, 7, b"0123456"))
    yield "a raw block past the end", 7, frame(7, (RAW, 7, b"012345"))
    yield "a raw block past the output", 7, frame(7, (RAW, 8, b"01234567"))
    yield "a run without its byte", 7, frame(7, (RLE, 7, b""))
    yield "a run past the output", 7, frame(7, (RLE, 8, b"x"))
    yield "a run beyond 128 KiB", 131_073, frame(131_073, (RLE, 131_073, b"x"))
    yield "the longest run", (1 << 21) - 1, frame((1 << 21) - 1, (RLE, (1 << 21) - 1, b"x"))
    yield "a coded block past the end", 7, frame(7, (COMPRESSED, 100, SEVEN[2]))
    yield "an empty coded block", 7, frame(7, (COMPRESSED, 0, b""))
    yield "a coded block larger than the content", 8, frame(8, literals(8, TWO, [b"\x07"] * 4))


def refused_literals() -> Iterator[tuple[str, int, bytes]]:
    """Yield frames with a block of literals that is damaged, or that the C coder leaves to others."""

    def block(count: int, *arguments: Any, **lies: Any) -> tuple[int, bytes]:
        return 100 + count, frame(100 + count, FILL, literals(count, *arguments, **lies))

    yield "codes of twelve bits", *block(1, direct(*range(1, 13)), [b"\x00\x10"])
    yield "a weight of fifteen", *block(7, direct(15, 15), [b"\xaa"])
    yield "an over-subscribed code", *block(7, direct(3, 1), [b"\xaa"])
    yield "an incomplete code", *block(7, direct(2), [b"\xaa"])
    yield "weights of zero", *block(7, direct(0, 0), [b"\xaa"])
    yield "128 weights that sum to 2048", *block(7, direct(*[5] * 128), [b"\xaa"])
    yield "more weights than bytes", *block(7, direct(1, stated=100), [b"\xaa"])
    yield "a description without a stream", *block(7, TWO, [b""])
    yield "no description", *block(7, b"", [b""])
    # Weights as an FSE stream: its size, the accuracy less five in four bits, the counts, and the stream.
    for fse in ("00", "0100", "0200 00", "0210 00", "0410 00 00 80", "0420 ff ff ff", "02ff ff", "0400 ff ff ff"):
        yield f"the FSE description {fse}", *block(7, bytes.fromhex(fse), [b"\xaa"])
    yield "a stream that ends in zeros", *block(7, TWO, [b"\xaa\x00"])
    yield "a stream with a bit too many", *block(6, TWO, [b"\xaa"])
    yield "a stream with a bit too few", *block(8, TWO, [b"\xaa"])
    yield "a long stream that ends early", *block(64, TWO, [b"\xaa" * 7 + b"\x01"])
    yield "a first block without a description", *block(7, b"", [b"\xaa"], kind=3)
    yield "raw literals", *block(7, b"", [b"0123456"], kind=0)
    yield "repeated literals", *block(7, b"", [b"x"], kind=1)
    yield "no literals", *block(0, TWO, [b"\x01"])
    yield "more literals than content", 107, frame(107, FILL, literals(8, TWO, [b"\x55\x01"]))
    yield "more literals than a block", *block(131_073, TWO, [STREAM] * 4, form=3)
    yield "four streams for four bytes", *block(4, TWO, [b"\x03"] * 4)
    yield "four streams without a jump table", *block(64, TWO, [], form=1, jumps=[3, 3])
    yield "literals longer than the block", *block(7, TWO, [b"\xaa"], length=4)
    yield "literals shorter than the block", *block(7, TWO, [b"\xaa"], length=2)
    yield "sequences", *block(7, TWO, [b"\xaa"], sequences=b"\x01\x54\x00\x00\x00\x01")
    yield "a byte after no sequences", *block(7, TWO, [b"\xaa"], sequences=b"\0\0")
    yield "no end of the literals", *block(7, TWO, [b"\xaa"], sequences=b"")
    for place in range(3):
        for jump in (0, 2, 4, 7, 0xFFFF):
            jumps = [jump if i == place else 3 for i in range(3)]
            yield f"the jumps {jumps}", *block(64, TWO, [STREAM] * 4, jumps=jumps)
    for place in range(4):
        streams = [b"" if i == place else STREAM for i in range(4)]
        yield f"an empty stream {place}", *block(64, TWO, streams)


ACCEPTED = {label: (count, data) for label, count, data in accepted()}
REFUSED = {label: (count, data) for each in (refused_fields(), refused_literals()) for label, count, data in each}
