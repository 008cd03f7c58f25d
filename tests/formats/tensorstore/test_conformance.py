"""The conformance suite of formats, for the ways of writing arrays that differ most."""

import pytest

from tensorkeep.formats import tensorstore
from tensorkeep.testing.format_suite import FormatSuite

pytest.importorskip("tensorstore")


class TestZarr3(FormatSuite):
    """The default: raw, with a CRC-32C of every chunk."""

    format = tensorstore.FORMAT
    covers_every_byte = True


@pytest.mark.slow
class TestZarr2AsDocumented(FormatSuite):
    """Chunks of 4,096 elements, the key ``compressor`` left out, one array after the other; without checksums."""

    format = tensorstore.FORMAT
    options = {"zarr": 2, "compressor": "as-documented", "chunk": 4096, "in_flight": "one"}  # noqa: RUF012
    detects_damage = False


class TestOcdbt(FormatSuite):
    format = tensorstore.FORMAT
    options = {"kvstore": "ocdbt"}  # noqa: RUF012
