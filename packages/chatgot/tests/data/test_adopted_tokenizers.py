"""Tokenizers of runs, prepared data and Hugging Face folders: tokens of the whole text, and refusals by name."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chatgot.data.dataset import Dataset
from chatgot.data.prepare import prepare
from chatgot.data.tokenizers.base import prompt_ids
from chatgot.data.tokenizers.bpe import BpeTokenizer
from chatgot.data.tokenizers.char import CharTokenizer
from chatgot.data.tokenizers.chat import ChatTokenizer
from chatgot.data.tokenizers.huggingface import HuggingFaceTokenizer, read_tokenizer
from chatgot.data.tokenizers.registry import tokenizer_from_dict
from chatgot.generate import ChatSession, Sampling
from chatgot.model.config import ModelConfig
from chatgot.model.gpt import GPT
from chatgot.scoring import read_tokens
from chatgot.testing import TINY, train_run
from tensorkeep.errors import CorruptCheckpointError, UnsupportedError, UsageError
from tensorkeep.testing.cases import case
from tiers import exhaustive

END = "<|endoftext|>"
LETTERS = CharTokenizer(" abehortu", documents=True)


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    """Return the ``tokenizer.json`` of byte pairs, as an object."""
    pytest.importorskip("tokenizers")
    pairs = BpeTokenizer.learn(iter([iter(["to be or not to be " * 9])]), True, vocab_size=280)
    return json.loads(pairs.hugging_face_json())  # type: ignore[no-any-return]


def model_folder(folder: Path, stored: dict[str, Any]) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    return folder


def read(folder: Path) -> HuggingFaceTokenizer:
    tokenizer = read_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def test_truncation_and_padding_of_the_file_are_left_out_and_composed_characters_the_only_normalization(
    tmp_path: Path, stored: dict[str, Any]
) -> None:
    limits = {
        "truncation": {"max_length": 4, "stride": 0, "strategy": "LongestFirst", "direction": "Right"},
        "padding": {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
        | {"pad_type_id": 0, "pad_token": "x"},
    }
    tokenizer = read(model_folder(tmp_path, stored | limits))
    for text in ("t", "to be or not to be, more than four tokens"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    for normalizer, decomposed in (({"type": "NFC"}, "Ü"), ({"type": "Sequence", "normalizers": []}, "U\u0308")):
        tokenizer = read(model_folder(tmp_path, stored | {"normalizer": normalizer}))
        assert tokenizer.decode(tokenizer.encode("Ünï Ab")) == "Ünï Ab", normalizer
        assert tokenizer.decode(tokenizer.encode("U\u0308")) == decomposed, normalizer


def test_a_tokenizer_that_changes_or_ends_text_is_refused(tmp_path: Path, stored: dict[str, Any]) -> None:
    sequence = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}
    prefix = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    for change, message in (
        ({"normalizer": {"type": "Lowercase"}}, "its normalizer Lowercase changes the text"),
        ({"normalizer": sequence}, "its normalizer Lowercase changes the text"),
        ({"pre_tokenizer": prefix}, "it does not give back the text that it encodes"),
        ({}, "it encodes text as 't', which ends a document"),
    ):
        if not change:
            (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "t"}')
        with case(change), pytest.raises(UnsupportedError, match=message):
            read(model_folder(tmp_path, stored | change))


def test_text_is_not_encoded_as_an_end_that_the_file_does_not_call_special(
    tmp_path: Path, stored: dict[str, Any]
) -> None:
    added = [each | {"special": False} for each in stored["added_tokens"]]
    assert [each["content"] for each in added] == [END]
    tokenizer = read(model_folder(tmp_path, stored | {"added_tokens": added}))
    text = f"to be {END} or"
    assert tokenizer.end_of_document not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_tokenizer_without_an_end_is_for_streams_and_conversations(tmp_path: Path, stored: dict[str, Any]) -> None:
    """As `export` writes that of a run on one text."""
    tokenizer = read(model_folder(tmp_path, stored | {"added_tokens": []}))
    assert tokenizer.end_of_document is None
    assert tokenizer_from_dict(tokenizer.as_dict()).digest == tokenizer.digest
    (tmp_path / "text.txt").write_text("to be or not to be " * 40)
    made = prepare(tmp_path / "text.txt", tmp_path / "stream", tokenizer=f"from:{tmp_path}")
    assert Dataset.open(made.path).tokenizer.digest == tokenizer.digest
    assert ChatTokenizer(tokenizer).end_of_document == tokenizer.vocab_size + 4
    (tmp_path / "documents.jsonl").write_text('{"text": "to be"}\n' * 40)
    with pytest.raises(UsageError, match="has no token that ends one") as raised:
        prepare(tmp_path / "documents.jsonl", tmp_path / "documents", tokenizer=f"from:{tmp_path}")
    assert "state eos_token in its tokenizer_config.json" in str(raised.value.remedy)


def test_documents_and_prompts_begin_as_the_tokenizer_begins_each_text(
    tmp_path: Path, stored: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """LLaMA 3's has a template with a first token, which its models were trained with."""
    from tokenizers import Tokenizer

    begin = stored["added_tokens"][0]["id"] + 1
    first, text = (
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
    )
    template: dict[str, Any] = {"type": "TemplateProcessing", "single": [first, text[0]], "pair": [first, *text]}
    template["special_tokens"] = {"<s>": {"id": "<s>", "ids": [begin], "tokens": ["<s>"]}}
    added = [*stored["added_tokens"], {**stored["added_tokens"][0], "id": begin, "content": "<s>", "special": False}]
    model_folder(tmp_path, stored | {"added_tokens": added, "post_processor": template})
    (tmp_path / "documents.jsonl").write_text('{"text": "to be"}\n' * 40)
    (tmp_path / "text.txt").write_text("to be " * 40)
    talk(tmp_path)
    model = GPT(ModelConfig(vocab_size=300, context_length=16, n_layers=1, n_heads=1, d_model=2))
    stated = {"add_bos_token": True, "bos_token": {"content": "<s>"}}
    for settings, opening in (({}, [begin]), (stated, [begin]), ({"add_bos_token": False}, [])):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, **settings}))
        tokenizer, name = read(tmp_path), f"from:{tmp_path}"
        contradiction = "add_bos_token is false, and the tokenizer itself puts ['<s>'] before a text: documents begin"
        assert (contradiction in capsys.readouterr().err) == (not opening)
        ids, chat = [*opening, *tokenizer.encode("to be").tolist()], ChatTokenizer(tokenizer)
        turns = [chat.message("user", "or").tolist(), chat.message("assistant", "to be").tolist()]
        with case(settings):
            assert tokenizer_from_dict(tokenizer.as_dict()).opening == opening
            assert Tokenizer.from_str(tokenizer.hugging_face_json()).encode("to be").ids == ids
            assert (prompt_ids(tokenizer, "to be"), prompt_ids(tokenizer, None)) == (ids, opening or [begin - 1])
            assert not {*opening} & {*tokenizer.encode("<s>").tolist()} and {begin - 1, *opening} <= chat.reserved
            for source, tokens in (
                ("documents.jsonl", [*ids, begin - 1]),
                ("talk.jsonl", [*opening, *turns[0], *turns[1], chat.end_of_document]),
                ("text.txt", [*opening, *tokenizer.encode("to be " * 36).tolist()]),
            ):
                made = prepare(tmp_path / source, tmp_path / "data", tokenizer=name, overwrite=True)
                split = Dataset.open(made.path).train.tolist()
                assert split == tokens * (len(split) // len(tokens)), source
            measured = read_tokens(tmp_path / "documents.jsonl", tokenizer).tolist()
            assert measured == [begin - 1] * (not opening) + [*ids, begin - 1] * 40
            session = ChatSession(model, chat, Sampling(), max_new_tokens=1)
            _ = list(session.answer("or"))
            assert session._cache.length == len(opening) + len(turns[0]) + 1
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": true, "bos_token": "<none>"}')
    with pytest.raises(UnsupportedError, match="has no token '<none>' to begin a document"):
        read(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    template["single"] = [first, first, text[0]]
    with pytest.raises(UnsupportedError, match="puts 2 tokens before each text"):
        read(model_folder(tmp_path, stored | {"added_tokens": added, "post_processor": template}))


def test_a_malformed_file_is_named(tmp_path: Path, stored: dict[str, Any]) -> None:
    settings, tokenizer = "is not the settings of a tokenizer", "is not a tokenizer"
    for name, reason, content in (
        *(("tokenizer.json", tokenizer, each) for each in (b"\xff", b"{bad", b"[1]")),
        *(
            ("tokenizer_config.json", settings, each)
            for each in (b"{bad", b"[1]", b'{"eos_token": 3}', b'{"eos_token": "\xff"}')
        ),
    ):
        (model_folder(tmp_path, stored) / name).write_bytes(content)
        with case((name, content)):
            with pytest.raises(CorruptCheckpointError, match=reason) as caught:
                read(tmp_path)
            assert caught.value.path == str(tmp_path / name)


def talk(folder: Path, name: str = "talk.jsonl", answer: str = "to be") -> Path:
    """Write conversations."""
    messages = [{"role": "user", "content": "or"}, {"role": "assistant", "content": answer}]
    (folder / name).write_text(f"{json.dumps({'messages': messages})}\n" * 40)
    return folder / name


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe"])
def test_conversations_take_the_tokenizer_of_a_run_or_of_prepared_data(tmp_path: Path, tokenizer: str) -> None:
    data = prepare(talk(tmp_path), tmp_path / "data", tokenizer=tokenizer).path
    train_run(TINY.changed({"loop.steps": 1, "model.context_length": 16}), tmp_path / "run", data)
    for number, source in enumerate(("run", "data", "run+chat", "data+chat")):
        made = Dataset.open(
            prepare(talk(tmp_path), tmp_path / str(number), tokenizer=f"from:{tmp_path}/{source}").path, verify=True
        )
        assert made.tokenizer.digest == Dataset.open(data).tokenizer.digest
        assert (np.array(made.train) == np.array(Dataset.open(data).train)).all()


TOKENIZERS = {"letters": "", "data": "from:{}/base", "data+chat": "from:{}/base+chat"}


@pytest.mark.parametrize(
    ("processes", "kind", "tokenizers"),
    [
        *((1, kind, TOKENIZERS) for kind in ("text", "documents", "conversations")),
        # A process passes on the error of any tokenizer.
        pytest.param(2, "conversations", ["data+chat"], marks=pytest.mark.integration),
        *exhaustive(*((2, kind, TOKENIZERS) for kind in ("text", "documents", "conversations"))),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list | dict) else str(value),
)
def test_a_character_outside_the_vocabulary_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], processes: int, kind: str, tokenizers: Iterable[str]
) -> None:
    source = tmp_path / ("a.txt" if kind == "text" else "a.jsonl")
    source.write_text("the\u00e9 other " * 40 if kind == "text" else '{"text": "the\u00e9 other"}\n' * 40)
    if kind == "conversations":
        talk(tmp_path, "a.jsonl", "th\u00e9")
    (tmp_path / "base.jsonl").write_text('{"text": "the author be"}\n' * 40)
    prepare(tmp_path / "base.jsonl", tmp_path / "base", tokenizer="char")
    for name in tokenizers:
        tokenizer = TOKENIZERS[name].format(tmp_path) if name != "letters" else LETTERS
        with pytest.raises(UsageError, match=r"the character 'é' \(U\+00E9\) is not in the vocabulary") as caught:
            prepare(source, tmp_path / "data", tokenizer=tokenizer, processes=processes)
        assert caught.value.path == str(source)
    assert "Traceback" not in capfd.readouterr().err


def test_tokens_of_messages_are_added_to_prepared_data_and_its_size_cannot_be_set(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be " * 20)
    prepare(tmp_path / "a.txt", tmp_path / "a", tokenizer="byte")
    made = prepare(tmp_path / "a.txt", tmp_path / "b", tokenizer=f"from:{tmp_path}/a+chat")
    assert made.description["tokenizer"] == "byte+chat"
    assert Dataset.open(made.path).vocab_size == 261
    for tokenizer in (LETTERS, f"from:{tmp_path}/a", f"from:{tmp_path}/a+chat"):
        with pytest.raises(UsageError, match="has a fixed vocabulary size"):
            prepare(tmp_path / "a.txt", tmp_path / "c", tokenizer=tokenizer, vocab_size=300)
