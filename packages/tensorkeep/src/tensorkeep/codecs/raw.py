"""The codec ``raw``: the bytes, unchanged."""

import numpy as np

from tensorkeep.codecs.base import Bytes, Codec, CodecError, check_padding
from tensorkeep.state.dtypes import DType


class RawCodec:
    name = "raw"

    def bound(self, nbytes: int) -> int:
        return nbytes

    def encode(self, raw: Bytes, dtype: DType, out: Bytes) -> int:
        np.copyto(out[: raw.size], raw)
        return raw.size

    def decode(self, stored: Bytes, dtype: DType, out: Bytes) -> None:
        # The last block of a task may be padded with zeros to a whole page.
        if stored.size < out.size:
            raise CodecError(f"{stored.size} bytes are stored where {out.size} are needed")
        check_padding(stored, out.size)
        np.copyto(out, stored[: out.size])


CODEC: Codec = RawCodec()
