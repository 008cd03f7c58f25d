"""Every built-in codec passes the conformance suite for codecs."""

from tensorkeep.codecs import gzip, planes, raw, zstd
from tensorkeep.testing.codec_suite import CodecSuite


class TestRaw(CodecSuite):
    codec = raw.CODEC


class TestZstd(CodecSuite):
    codec = zstd.CODEC


class TestGzip(CodecSuite):
    codec = gzip.CODEC


class TestPlanes(CodecSuite):
    codec = planes.CODEC
