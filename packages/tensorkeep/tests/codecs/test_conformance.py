"""Every built-in codec passes the conformance suite for codecs; byte planes do with each coder and its instructions."""

from collections.abc import Iterator

import pytest

from tensorkeep.codecs import coder, gzip, planes, raw, zstd
from tensorkeep.testing.codec_suite import CodecSuite

NOT_BUILT = "the extension is not built, or TENSORKEEP_CODER=python is set"
needs_extension = pytest.mark.skipif(coder.compiled is None, reason=NOT_BUILT)


@pytest.fixture(scope="class")
def plain_instructions() -> Iterator[None]:
    coder.compiled.use("plain")
    yield
    coder.compiled.use(coder.compiled.kinds[-1])


class TestRaw(CodecSuite):
    codec = raw.CODEC


class TestZstd(CodecSuite):
    codec = zstd.CODEC


class TestGzip(CodecSuite):
    codec = gzip.CODEC


class TestPlanesPython(CodecSuite):
    codec = planes.PlanesCodec(coder.PythonCoder)


@needs_extension
class TestPlanesCompiled(CodecSuite):
    codec = planes.PlanesCodec(coder.CompiledCoder)


@needs_extension
@pytest.mark.usefixtures("plain_instructions")
class TestPlanesCompiledPlain(CodecSuite):
    codec = planes.PlanesCodec(coder.CompiledCoder)
