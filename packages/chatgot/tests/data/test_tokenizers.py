"""Tokenizers: encoding and decoding round-trip, in one piece and in many, and stored tokenizers are restored."""

import base64
import hashlib
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatgot.data.tokenizers import bpe
from chatgot.data.tokenizers.base import END_OF_DOCUMENT, LONGEST_UNCUT, Tokenizer, at_line_ends, token_dtype
from chatgot.data.tokenizers.char import ByteTokenizer
from chatgot.data.tokenizers.registry import make_tokenizer, tokenizer_from_dict
from tensorkeep.errors import CorruptCheckpointError, MissingExtraError, UnsupportedError, UsageError
from tensorkeep.testing.cases import case

PIECES = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=12)
LINES = st.lists(
    st.text(st.sampled_from("ab1_ \t\n\r.,'/é漢 \u2028"), max_size=10) | st.sampled_from(["don't ", "x\ny", ";\n/a"]),
    max_size=30,
)
CORPUS = "the cat sat on the mat\nthe dog didn't; the cat did.\n\n  def f(x):\n    return x\nnaïve 漢字 🙂\n" * 20


def learned(name: str, *documents: list[str], vocab_size: int | None = None, ends: bool = False) -> Tokenizer:
    corpus: Iterator[Iterator[str]] = map(iter, documents)
    return make_tokenizer(name, vocab_size)(corpus, documents=ends)


@pytest.fixture(scope="module")
def pairs() -> Tokenizer:
    pytest.importorskip("tokenizers")
    return learned("bpe", [CORPUS], vocab_size=300, ends=True)


def whole(tokenizer: Tokenizer, pieces: list[str]) -> list[int]:
    return [int(id) for piece in tokenizer.pieces(iter(pieces)) for id in tokenizer.encode(piece)]


@given(PIECES)
def test_characters_and_bytes_round_trip_from_any_pieces(pieces: list[str]) -> None:
    text = "".join(pieces)
    characters, octets = learned("char", pieces, [text or "x"], ends=True), ByteTokenizer(documents=True)
    assert characters.vocab_size == len(set(text or "x")) + 1
    assert octets.encode(text).tolist() == list(text.encode())
    assert octets.decode([0x41, 0xC3, 0x42]) == "A\ufffdB"
    for tokenizer in (characters, octets):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert whole(tokenizer, pieces) == tokenizer.encode(text).tolist()


@given(st.lists(st.integers(0, 10**6), max_size=40), st.integers(0, 2))
def test_streamed_text_is_that_of_decode(pairs: Tokenizer, ids: list[int], which: int) -> None:
    tokenizer = (pairs, ByteTokenizer(documents=True), learned("char", [CORPUS], ends=True))[which]
    ids = [id % tokenizer.vocab_size for id in ids]
    assert "".join(tokenizer.decode_stream(ids)) == tokenizer.decode(ids)


def test_streamed_text_has_complete_characters_as_soon_as_they_are_known() -> None:
    tokenizer = ByteTokenizer(documents=False)
    read: list[int] = []

    def ids() -> Iterator[int]:
        for id in "aé🙂b".encode():
            read.append(id)
            yield id

    pieces = [(piece, len(read)) for piece in tokenizer.decode_stream(ids())]
    assert pieces == [("a", 1), ("é", 3), ("🙂", 7), ("b", 8)]
    assert list(tokenizer.decode_stream("é".encode()[:1])) == ["\ufffd"]
    with pytest.raises(UsageError, match="256 is not a token of byte"):
        list(tokenizer.decode_stream([256]))


@given(LINES)
def test_byte_pairs_round_trip_and_do_not_depend_on_pieces(pairs: Tokenizer, pieces: list[str]) -> None:
    text = "".join(pieces)
    assert pairs.decode(pairs.encode(text)) == text
    assert whole(pairs, pieces) == pairs.encode(text).tolist()


@given(LINES)
def test_text_is_cut_only_at_safe_line_ends_and_nothing_is_lost(pieces: list[str]) -> None:
    cut = list(at_line_ends(iter(pieces)))
    assert "".join(cut) == "".join(pieces)
    for left, right in pairwise(cut):
        assert left.endswith("\n")
        assert not left[-2].isspace()
        assert right[0].isalnum() or right[0] == "_"


def test_long_text_without_line_ends_is_cut() -> None:
    pieces = ["x" * (1 << 16)] * 40
    cut = list(at_line_ends(iter(pieces)))
    assert [len(text) for text in cut] == [LONGEST_UNCUT, LONGEST_UNCUT, 8 << 16]


def test_characters_are_numbered_as_nanogpt_does_and_unknown_ones_are_named() -> None:
    tokenizer = learned("char", ["hello ", "world"], ["!"])
    assert tokenizer.as_dict()["characters"] == " !dehlorw"
    assert tokenizer.encode("hello").tolist() == [4, 3, 5, 5, 6]
    assert tokenizer.end_of_document is None
    for text, message in (("olé", r"'é' \(U\+00E9\) is not in the vocabulary"), ("A", "'A'")):
        with pytest.raises(UsageError, match=message):
            tokenizer.encode(text)
    for id in (-1, 9):
        with pytest.raises(UsageError, match=f"{id} is not a token of char, which has 9 tokens"):
            tokenizer.decode([0, id])
    for name in ("char", "byte"):
        with pytest.raises(UsageError, match="character 2 of the text is half of a surrogate pair"):
            learned(name, ["ab"]).encode("ab\ud800")


def test_end_of_document_is_decoded_and_never_encoded(pairs: Tokenizer) -> None:
    for tokenizer in (learned("char", [END_OF_DOCUMENT], ends=True), ByteTokenizer(documents=True), pairs):
        end = tokenizer.end_of_document
        assert end == tokenizer.vocab_size - 1
        ids = tokenizer.encode(END_OF_DOCUMENT)
        assert end not in ids
        assert tokenizer.decode([end, *ids, end]) == END_OF_DOCUMENT * 3


def test_tokens_are_as_small_as_the_vocabulary_allows() -> None:
    assert [token_dtype(size).name for size in (2, 65536, 65537)] == ["uint16", "uint16", "uint32"]
    text = "".join(map(chr, range(0x10000, 0x10000 + 65537)))
    tokenizer = learned("char", [text])
    assert tokenizer.encode(text).dtype == np.uint32
    assert tokenizer.decode(tokenizer.encode(text[-3:])) == text[-3:]


def test_byte_pairs_are_learned_and_hugging_face_reads_them(pairs: Tokenizer) -> None:
    assert 257 < pairs.vocab_size <= 300
    assert len(pairs.encode("the cat")) < 7
    again = learned("bpe", [CORPUS[:1000], CORPUS[1000:]], vocab_size=300, ends=True)
    assert again.digest == pairs.digest
    assert learned("bpe", [CORPUS], vocab_size=290).digest != pairs.digest
    # Each merge takes time for the whole word that it is in: a long word is learned from in parts.
    word = learned("bpe", ["ab" * 3000], vocab_size=400)
    assert max(len(word.token_bytes(id)) for id in range(word.vocab_size)) == 1024
    assert word.decode(word.encode("ab" * 3000)) == "ab" * 3000
    library, text = pytest.importorskip("tokenizers"), pairs.hugging_face_json()
    assert text is not None
    theirs = library.Tokenizer.from_str(text)
    assert theirs.get_vocab_size() == pairs.vocab_size
    assert theirs.encode("the naïve cat").ids == pairs.encode("the naïve cat").tolist()
    assert theirs.encode(END_OF_DOCUMENT).ids == [pairs.end_of_document]
    assert learned("char", ["a"]).hugging_face_json() is None


def test_stored_tokenizer_is_restored_and_a_malformed_one_refused(pairs: Tokenizer) -> None:
    digests = set()
    char, with_ends = learned("char", [CORPUS]), learned("char", [CORPUS], ends=True)
    for tokenizer in (char, with_ends, ByteTokenizer(documents=False), pairs):
        again = tokenizer_from_dict(json.loads(json.dumps(tokenizer.as_dict())))
        for name in ("digest", "name", "vocab_size", "end_of_document"):
            assert getattr(again, name) == getattr(tokenizer, name), name
        assert again.encode("the naïve 🙂").tolist() == tokenizer.encode("the naïve 🙂").tolist()
        digests.add(tokenizer.digest)
    assert len(digests) == 4
    stored = pairs.as_dict()
    for malformed, message in (
        ({}, "tokenizer"),
        ({"kind": "other"}, "tokenizer"),
        ({"kind": ["char"]}, "tokenizer"),
        ({"kind": "char", "characters": "abc"}, "tokenizer"),
        *(
            ({"kind": "char", "characters": each, "end_of_document": False}, "tokenizer")
            for each in ("", "ba", "aa", ["a"])
        ),
        ({"kind": "byte", "end_of_document": 1}, "tokenizer"),
        ({**stored, "vocabulary": ["a", "b"]}, "the bpe tokenizer is malformed"),
        ({**stored, "vocabulary": [*stored["vocabulary"], "!"]}, "the bpe tokenizer is malformed"),
        *(
            ({**stored, "merges": [pair]}, "the bpe tokenizer is malformed")
            for pair in (["a"], ["a", "nothing"], ["!", "~"])
        ),
    ):
        with case(malformed), pytest.raises(CorruptCheckpointError, match=message):
            tokenizer_from_dict(malformed)


def test_invalid_tokenizer_choices_are_refused() -> None:
    pytest.importorskip("tokenizers")
    for name, size, message in (
        *((name, None, "there is no tokenizer") for name in ("words", "bpe:x", "tiktoken", "tiktoken:", "char:", "")),
        ("bytes", None, "did you mean 'byte'"),
        ("char", 100, "has a fixed vocabulary size"),
        *(("bpe", size, "is not possible") for size in (0, 256, -1, 1 << 31, True)),
    ):
        with case((name, size)), pytest.raises(UsageError, match=message):
            make_tokenizer(name, size)


def test_packages_are_imported_where_they_are_used_and_a_missing_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not hasattr(bpe, "tokenizers")
    assert not hasattr(sys.modules["chatgot.data.tokenizers.tiktoken"], "tiktoken")
    for module, name in (("tokenizers", "bpe"), ("tiktoken", "tiktoken:gpt2")):
        monkeypatch.setitem(sys.modules, module, None)
        with case(module), pytest.raises(MissingExtraError, match=r"pip install \./packages/chatgot"):
            make_tokenizer(name)


ADDRESS = "https://example.invalid/tiny.tiktoken"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of tiktoken's, still empty, and an encoding ``tiny`` whose vocabulary would be downloaded."""
    pytest.importorskip("tiktoken")
    from tiktoken import load, registry

    def tiny() -> dict[str, Any]:
        ranks = load.load_tiktoken_bpe(ADDRESS)
        special = {END_OF_DOCUMENT: 260}  # 258 and 259 are gaps, as newer vocabularies have them
        return {"name": "tiny", "pat_str": r"\S+|\s+", "mergeable_ranks": ranks, "special_tokens": special}

    registry.list_encoding_names()
    monkeypatch.setitem(registry.ENCODING_CONSTRUCTORS, "tiny", tiny)
    monkeypatch.setattr(registry, "ENCODINGS", {})
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    return tmp_path


def fill(cache: Path) -> None:
    tokens = [*(bytes([value]) for value in range(256)), b"th", b"the"]
    lines = [base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens)]
    (cache / hashlib.sha1(ADDRESS.encode()).hexdigest()).write_bytes(b"".join(lines))


def test_uncached_vocabulary_is_never_downloaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiktoken import load

    real = load.read_file
    for folder in (cache, ""):  # the latter switches the cache off
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
        with case(folder), pytest.raises(UnsupportedError, match="it is not downloaded") as caught:
            make_tokenizer("tiktoken:tiny")
        assert ADDRESS in caught.value.message
        assert "TIKTOKEN_CACHE_DIR" in str(caught.value.remedy)
        assert load.read_file is real


def test_cached_vocabulary_is_used_and_stored(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(cache)
    tokenizer = learned("tiktoken:tiny", ["unread"], ends=True)
    assert (tokenizer.vocab_size, tokenizer.end_of_document, tokenizer.name) == (261, 260, "tiktoken:tiny")
    assert tokenizer.encode("the é").tolist() == [257, 32, 0xC3, 0xA9]
    assert tokenizer.encode(END_OF_DOCUMENT).max() < 260
    assert whole(tokenizer, ["the\nt", "he"]) == tokenizer.encode("the\nthe").tolist()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache / "elsewhere"))
    again = tokenizer_from_dict(json.loads(json.dumps(tokenizer.as_dict())))
    assert again.digest == tokenizer.digest
    assert again.decode([257, 260, 0xC3]) == f"the{END_OF_DOCUMENT}\ufffd"
    assert again.decode([257, 258, 257]) == "the\ufffdthe"


def test_unknown_encodings_and_malformed_vocabularies_are_refused(cache: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'gpt2'"):
        make_tokenizer("tiktoken:gpt-2")
    fill(cache)
    stored = learned("tiktoken:tiny").as_dict()
    for change in (
        *({"ranks": each} for each in ({"!": 0}, {"YQ==": 0})),
        *({"special_tokens": each} for each in ({END_OF_DOCUMENT: 0}, {END_OF_DOCUMENT: 1 << 60}, {"other": 260})),
        {"pattern": "("},
    ):
        with case(change), pytest.raises(CorruptCheckpointError, match="the tiktoken tokenizer is malformed"):
            tokenizer_from_dict({**stored, **change})
