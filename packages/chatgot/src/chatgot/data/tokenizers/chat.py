"""Reserved tokens of conversations beyond the vocabulary of another tokenizer."""

from functools import cached_property
from typing import Any

import numpy as np

from chatgot.data.tokenizers.base import END_OF_DOCUMENT, Ids, Tokenizer, Tokens, library

SUFFIX = "+chat"
"""The end of the name of such a tokenizer, after the name of the tokenizer of its text."""

ROLES = ("system", "user", "assistant")
_RESERVED = (*(f"<|{role}|>" for role in ROLES), "<|end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The same format for transformers' ``apply_chat_template``."""


class ChatTokenizer(Tokenizer):
    """Another tokenizer with tokens that begin a message of a role, and one that ends a message.

    The ids of these tokens follow the ids of the vocabulary. No text is encoded as them: characters such as ``<|end|>``
    in a text are ordinary text. If the other tokenizer has no token that ends a document, one more is reserved for it.

    Examples
    --------
    >>> from chatgot.data.tokenizers.char import ByteTokenizer
    >>> tokenizer = ChatTokenizer(ByteTokenizer(documents=True))
    >>> tokenizer.decode([tokenizer.begin["user"], *b"hi", tokenizer.end])
    '<|user|>hi<|end|>'
    """

    kind = "chat"

    def __init__(self, text: Tokenizer) -> None:
        self.text = text
        self.name = f"{text.name}{SUFFIX}"
        self.merges = text.merges
        self.encodes_any_text = text.encodes_any_text
        first = text.vocab_size
        # The tokens that begin a message of a role, and the token that ends it.
        self.begin = {role: first + number for number, role in enumerate(ROLES)}
        self.end = first + len(ROLES)
        own_end = text.end_of_document is None
        self.end_of_document = self.end + 1 if own_end else text.end_of_document
        self.begin_of_document = text.begin_of_document
        self.vocab_size = self.end + 1 + own_end

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ChatTokenizer":
        """Return a tokenizer with the reserved tokens; one that has them is returned as it is."""
        return tokenizer if isinstance(tokenizer, ChatTokenizer) else cls(tokenizer)

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> "ChatTokenizer":
        # The registry reads the tokenizer of the text, which may be of any kind.
        return cls(stored["text"])

    @cached_property
    def stops(self) -> frozenset[int]:
        """The tokens that end the text of a message: all that are not text."""
        reserved = {*self.begin.values(), self.end}
        return frozenset(reserved if self.end_of_document is None else {*reserved, self.end_of_document})

    @property
    def reserved(self) -> frozenset[int]:
        return self.stops | self.text.reserved

    def message(self, role: str, content: str) -> Ids:
        """Return the tokens of one message; UsageError if the tokenizer cannot encode its text."""
        return np.array([self.begin[role], *self.encode(content).tolist(), self.end], np.int64)

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "text": self.text.as_dict()}

    def hugging_face_json(self) -> str | None:
        """Return the ``tokenizer.json`` of the same tokens, with the reserved ones as special tokens.

        None if the other tokenizer has tokens with these names already, since names are unique there.
        """
        described = self.text.hugging_face_json()
        if described is None:
            return None
        exported = library("tokenizers").Tokenizer.from_str(described)
        names = [*_RESERVED, *([END_OF_DOCUMENT] if self.text.end_of_document is None else [])]
        exported.add_special_tokens(names)
        first = self.text.vocab_size
        same = [exported.token_to_id(name) for name in names] == list(range(first, first + len(names)))
        return str(exported.to_str()) if same else None

    def _encode(self, text: str) -> Tokens:
        return self.text.encode(text).astype(self.dtype)

    def _bytes(self, id: int) -> bytes:
        first = self.text.vocab_size
        return _RESERVED[id - first].encode() if id >= first else self.text._bytes(id)
