"""A process that tokenizes: ``python -m tensorkeep.train.data.encoding_worker DESCRIPTOR``.

`tensorkeep.train.data.encoding` starts it with the descriptor of a socket, over which it sends the tokenizer and then
lists of texts. The answer to a list is the number of tokens of each text, and all their tokens; or nothing, and the
message and the remedy of the error that a text cannot be encoded.
"""

import sys
from contextlib import suppress
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from tensorkeep.errors import UsageError
from tensorkeep.train.data.tokenizers.known import tokenizer_from_dict


def main(descriptor: int) -> None:
    """Answer until the connection is closed."""
    with suppress(EOFError, ConnectionError), Connection(descriptor) as connection:
        tokenizer = tokenizer_from_dict(msgspec.json.decode(connection.recv_bytes()))
        read_texts = msgspec.msgpack.Decoder(list[str])
        while True:
            try:
                tokens = [tokenizer.encode(text) for text in read_texts.decode(connection.recv_bytes())]
            except UsageError as error:
                connection.send_bytes(b"")
                connection.send_bytes(msgspec.json.encode([error.message, error.remedy]))
                continue
            connection.send_bytes(np.array([len(each) for each in tokens], np.int64))
            connection.send_bytes(np.concatenate(tokens))


if __name__ == "__main__":
    main(int(sys.argv[1]))
