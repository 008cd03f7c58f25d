"""For formats: their contract, boxes of tensors, metadata beside foreign files."""

from tensorkeep.codecs import coder
from tensorkeep.formats import checksummed_json, sidecar
from tensorkeep.formats.base import (
    BLOCK_BYTES,
    FORMATS,
    Format,
    FormatOptions,
    OpenSettings,
    Reader,
    StoredLeaf,
    Structure,
    WriteResult,
    WriteSettings,
    thread_bytes,
)
from tensorkeep.formats.blockfile.write import find_codec
from tensorkeep.formats.boxes import Box, box_of, box_shape, box_to_ranges, grid, grow, range_to_boxes
from tensorkeep.formats.decoding import decoding, missing_as
from tensorkeep.formats.finding import check_not_pointer
from tensorkeep.formats.native import manifest
from tensorkeep.formats.path_items import Item, items_of

__all__ = [
    "BLOCK_BYTES",
    "FORMATS",
    "Box",
    "Format",
    "FormatOptions",
    "Item",
    "OpenSettings",
    "Reader",
    "StoredLeaf",
    "Structure",
    "WriteResult",
    "WriteSettings",
    "box_of",
    "box_shape",
    "box_to_ranges",
    "check_not_pointer",
    "checksummed_json",
    "coder",
    "decoding",
    "find_codec",
    "grid",
    "grow",
    "items_of",
    "manifest",
    "missing_as",
    "range_to_boxes",
    "sidecar",
    "thread_bytes"
]  # fmt: skip
