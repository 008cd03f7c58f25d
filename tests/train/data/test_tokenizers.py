"""Tokenizers: encoding and decoding round-trip, in one piece and in many, and stored tokenizers are restored."""

import base64
import hashlib
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorkeep.errors import CorruptCheckpointError, MissingExtraError, UnsupportedError, UsageError
from tensorkeep.train.data.tokenizers import bpe, from_tiktoken
from tensorkeep.train.data.tokenizers.base import END_OF_DOCUMENT, LONGEST_UNCUT, Tokenizer, at_line_ends, token_dtype
from tensorkeep.train.data.tokenizers.char import ByteTokenizer
from tensorkeep.train.data.tokenizers.known import learner, tokenizer_from_dict

PIECES = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=12)
LINES = st.lists(
    st.text(st.sampled_from("ab1_ \t\n\r.,'/é漢 \u2028"), max_size=10) | st.sampled_from(["don't ", "x\ny", ";\n/a"]),
    max_size=30,
)
CORPUS = "the cat sat on the mat\nthe dog didn't; the cat did.\n\n  def f(x):\n    return x\nnaïve 漢字 🙂\n" * 20


def learned(name: str, *documents: list[str], vocab_size: int | None = None, ends: bool = False) -> Tokenizer:
    corpus: Iterator[Iterator[str]] = map(iter, documents)
    return learner(name, vocab_size)(corpus, documents=ends)


@pytest.fixture(scope="module")
def pairs() -> Tokenizer:
    pytest.importorskip("tokenizers")
    return learned("bpe", [CORPUS], vocab_size=300, ends=True)


def whole(tokenizer: Tokenizer, pieces: list[str]) -> list[int]:
    return [int(id) for tokens in tokenizer.encode_stream(iter(pieces)) for id in tokens]


@given(PIECES)
def test_characters_round_trip_from_any_pieces(pieces: list[str]) -> None:
    text = "".join(pieces) or "x"
    tokenizer = learned("char", pieces, [text], ends=True)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert whole(tokenizer, pieces) == tokenizer.encode("".join(pieces)).tolist()
    assert tokenizer.vocab_size == len(set(text)) + 1


IDS = st.lists(st.integers(0, 10**6), max_size=40)


@given(IDS, st.integers(0, 2))
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


@given(PIECES)
def test_bytes_round_trip_from_any_pieces(pieces: list[str]) -> None:
    tokenizer = ByteTokenizer(documents=True)
    text = "".join(pieces)
    assert tokenizer.encode(text).tolist() == list(text.encode())
    assert tokenizer.decode(whole(tokenizer, pieces)) == text


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


def test_characters_are_numbered_as_nanogpt_does() -> None:
    tokenizer = learned("char", ["hello ", "world"], ["!"])
    assert tokenizer.as_dict()["characters"] == " !dehlorw"
    assert tokenizer.encode("hello").tolist() == [4, 3, 5, 5, 6]
    assert tokenizer.end_of_document is None


def test_an_unknown_character_is_named() -> None:
    tokenizer = learned("char", ["abc"])
    with pytest.raises(UsageError, match=r"'é' \(U\+00E9\) is not in the vocabulary"):
        tokenizer.encode("abé")
    with pytest.raises(UsageError, match="'A'"):
        tokenizer.encode("A")


@pytest.mark.parametrize("name", ["char", "byte"])
def test_lone_surrogate_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="character 2 of the text is half of a surrogate pair"):
        learned(name, ["ab"]).encode("ab\ud800")


def test_ids_outside_the_vocabulary_are_refused() -> None:
    tokenizer = learned("char", ["abc"])
    for id in (-1, 3):
        with pytest.raises(UsageError, match=f"{id} is not a token of char, whose vocabulary has 3"):
            tokenizer.decode([0, id])


def test_end_of_document_is_decoded_and_never_encoded(pairs: Tokenizer) -> None:
    for tokenizer in (learned("char", [END_OF_DOCUMENT], ends=True), ByteTokenizer(documents=True), pairs):
        end = tokenizer.end_of_document
        assert end == tokenizer.vocab_size - 1
        ids = tokenizer.encode(END_OF_DOCUMENT)
        assert end not in ids
        assert tokenizer.decode([end, *ids, end]) == END_OF_DOCUMENT * 3


def test_broken_utf8_is_replaced() -> None:
    assert ByteTokenizer(documents=False).decode([0x41, 0xC3, 0x42]) == "A\ufffdB"


@pytest.mark.parametrize(("vocab_size", "name"), [(2, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_tokens_are_as_small_as_the_vocabulary_allows(vocab_size: int, name: str) -> None:
    assert token_dtype(vocab_size) == np.dtype(name)


def test_a_vocabulary_beyond_sixteen_bits() -> None:
    text = "".join(map(chr, range(0x10000, 0x10000 + 65537)))
    tokenizer = learned("char", [text])
    assert tokenizer.encode(text).dtype == np.uint32
    assert tokenizer.decode(tokenizer.encode(text[-3:])) == text[-3:]


def test_byte_pairs_are_learned(pairs: Tokenizer) -> None:
    assert 257 < pairs.vocab_size <= 300
    assert len(pairs.encode("the cat")) < 7
    again = learned("bpe", [CORPUS[:1000], CORPUS[1000:]], vocab_size=300, ends=True)
    assert again.digest == pairs.digest
    assert learned("bpe", [CORPUS], vocab_size=290).digest != pairs.digest


def test_hugging_face_reads_the_byte_pairs(pairs: Tokenizer) -> None:
    library = pytest.importorskip("tokenizers")
    text = pairs.hugging_face_json()
    assert text is not None
    theirs = library.Tokenizer.from_str(text)
    assert theirs.get_vocab_size() == pairs.vocab_size
    assert theirs.encode("the naïve cat").ids == pairs.encode("the naïve cat").tolist()
    assert theirs.encode(END_OF_DOCUMENT).ids == [pairs.end_of_document]
    assert learned("char", ["a"]).hugging_face_json() is None


def every(pairs: Tokenizer) -> list[Tokenizer]:
    return [learned("char", [CORPUS]), learned("char", [CORPUS], ends=True), ByteTokenizer(documents=False), pairs]


def test_stored_tokenizer_is_restored(pairs: Tokenizer) -> None:
    digests = set()
    for tokenizer in every(pairs):
        again = tokenizer_from_dict(json.loads(json.dumps(tokenizer.as_dict())))
        assert again.digest == tokenizer.digest
        assert again.name == tokenizer.name
        assert again.vocab_size == tokenizer.vocab_size
        assert again.end_of_document == tokenizer.end_of_document
        assert again.encode("the naïve 🙂").tolist() == tokenizer.encode("the naïve 🙂").tolist()
        digests.add(tokenizer.digest)
    assert len(digests) == 4


@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"kind": "other"},
        {"kind": ["char"]},
        {"kind": "char", "characters": "abc"},
        {"kind": "char", "characters": "", "end_of_document": False},
        {"kind": "char", "characters": "ba", "end_of_document": False},
        {"kind": "char", "characters": "aa", "end_of_document": False},
        {"kind": "char", "characters": ["a"], "end_of_document": False},
        {"kind": "byte", "end_of_document": 1},
    ],
)
def test_a_malformed_tokenizer_is_refused(stored: dict[str, Any]) -> None:
    with pytest.raises(CorruptCheckpointError, match="tokenizer"):
        tokenizer_from_dict(stored)


@pytest.mark.parametrize(
    "change",
    [
        {"vocabulary": ["a", "b"]},
        {"vocabulary": "twice"},
        {"merges": [["a"]]},
        {"merges": [["a", "nothing"]]},
        {"merges": [["!", "~"]]},
    ],
)
def test_malformed_byte_pairs_are_refused(pairs: Tokenizer, change: dict[str, Any]) -> None:
    stored = pairs.as_dict()
    if change.get("vocabulary") == "twice":
        change = {"vocabulary": [*stored["vocabulary"], "!"]}
    with pytest.raises(CorruptCheckpointError, match="the bpe tokenizer is malformed"):
        tokenizer_from_dict({**stored, **change})


def test_invalid_tokenizer_choices_are_refused() -> None:
    for name in ("words", "bpe:x", "tiktoken", "tiktoken:", "char:", ""):
        with pytest.raises(UsageError, match="there is no tokenizer"):
            learner(name)
    with pytest.raises(UsageError, match="did you mean 'byte'"):
        learner("bytes")
    with pytest.raises(UsageError, match="has a fixed vocabulary size"):
        learner("char", 100)


@pytest.mark.parametrize("vocab_size", [0, 256, -1, 1 << 31, True])
def test_invalid_vocabulary_sizes_are_refused(vocab_size: int) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(UsageError, match="is not possible"):
        learner("bpe", vocab_size)


@pytest.mark.parametrize(("module", "name"), [("tokenizers", "bpe"), ("tiktoken", "tiktoken:gpt2")])
def test_a_missing_package_is_named_with_its_pip_line(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[train\]'"):
        learner(name)


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
    with pytest.raises(UnsupportedError, match="it is not downloaded") as caught:
        learner("tiktoken:tiny")
    assert ADDRESS in caught.value.message
    assert caught.value.remedy is not None
    assert "TIKTOKEN_CACHE_DIR" in caught.value.remedy
    assert load.read_file is real
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # which switches the cache off
    with pytest.raises(UnsupportedError, match="it is not downloaded"):
        learner("tiktoken:tiny")


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


def test_an_unknown_encoding_is_refused_with_the_nearest(cache: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'gpt2'"):
        learner("tiktoken:gpt-2")


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": {"!": 0}},
        {"ranks": {"YQ==": 0}},
        {"special_tokens": {END_OF_DOCUMENT: 0}},
        {"special_tokens": {END_OF_DOCUMENT: 1 << 60}},
        {"special_tokens": {"other": 260}},
        {"pattern": "("},
    ],
)
def test_a_malformed_stored_vocabulary_is_refused(cache: Path, change: dict[str, Any]) -> None:
    fill(cache)
    stored = learned("tiktoken:tiny").as_dict()
    with pytest.raises(CorruptCheckpointError, match="the tiktoken tokenizer is malformed"):
        tokenizer_from_dict({**stored, **change})


def test_packages_are_imported_where_they_are_used() -> None:
    assert not hasattr(bpe, "tokenizers")
    assert not hasattr(from_tiktoken, "tiktoken")
