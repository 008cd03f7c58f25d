"""Encoding of a corpus: pieces of text become tokens, in order, in this process or in several, and token files."""

import os
import queue
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from chatgot.data.corpus import CorpusReader, SplitRule
from chatgot.data.dataset import (
    FORMAT,
    MIXTURE_VERSION,
    SPLITS,
    VERSION,
    CorpusRecord,
    DataManifest,
    MixturePart,
    Split,
    file_name,
)
from chatgot.data.tokenizers.base import Tokenizer, Tokens
from chatgot.data.tokenizers.registry import tokenizer_from_dict
from tensorkeep import __version__
from tensorkeep.errors import OutOfMemoryError, StoreError, TensorkeepError, UsageError
from tensorkeep.ext import Closing, machine
from tensorkeep.ext.formats import checksummed_json
from tensorkeep.ext.storage import DirectFile, store_errors

_WORKER = "chatgot.data.encoding"
# Bytes of a corpus that is tokenized before other processes have started and shared the work.
_SMALL_CORPUS = 16 << 20
# Characters that are passed to a process at once.
_JOB = 1 << 18
# Jobs that are computed or wait for each process; more would only take memory.
_JOBS_PER_PROCESS = 3
# Seconds that a process has to end after its connection was closed.
_PATIENCE = 10.0


class TextPiece(NamedTuple):
    """Text of a split that can be encoded by itself, whether a document ends with it, and reserved tokens around it."""

    split: str
    text: str
    ends_document: bool
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


def default_processes(tokenizer: Tokenizer, nbytes: int) -> int:
    # Tokens that are characters or bytes are found faster than text could be passed to another process.
    return len(machine.usable_processors()) if tokenizer.merges and nbytes >= _SMALL_CORPUS else 1


def encoded(tokenizer: Tokenizer, pieces: Iterator[TextPiece], processes: int) -> Generator[tuple[TextPiece, Tokens]]:
    """Yield each piece with its tokens, in order.

    Raises UsageError if the tokenizer cannot encode a piece; OutOfMemoryError or StoreError if a process ends early.
    """
    if processes == 1:
        for piece in pieces:
            yield piece, tokenizer.encode(piece.text)
        return
    waiting: deque[tuple[list[TextPiece], Future[list[Tokens]]]] = deque()
    with _pool(tokenizer, processes) as submit:
        for job in _jobs(pieces):
            waiting.append((job, submit([piece.text for piece in job])))
            # In the order of the text: a slow job holds the others back, hence more jobs than processes.
            if len(waiting) > _JOBS_PER_PROCESS * processes:
                job, tokens = waiting.popleft()
                yield from zip(job, tokens.result(), strict=True)
        for job, tokens in waiting:
            yield from zip(job, tokens.result(), strict=True)


def _jobs(pieces: Iterator[TextPiece]) -> Iterator[list[TextPiece]]:
    job: list[TextPiece] = []
    characters = 0
    for piece in pieces:
        job.append(piece)
        # An empty text costs something as well.
        characters += len(piece.text) + 1
        if characters >= _JOB:
            yield job
            job, characters = [], 0
    if job:
        yield job


@contextmanager
def _pool(tokenizer: Tokenizer, processes: int) -> Iterator[Callable[[list[str]], Future[list[Tokens]]]]:
    """Start processes, each served by a thread; yield a function that encodes texts in the next one that is idle."""
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

    def encode(texts: list[str]) -> list[Tokens]:
        worker = idle.get()
        try:
            return worker.encode(texts)
        finally:
            idle.put(worker)

    description = msgspec.json.encode(tokenizer.as_dict())
    with ExitStack() as stack:
        for _ in range(processes):
            worker = _Worker(description, tokenizer)
            stack.callback(worker.close)
            idle.put(worker)
        threads = ThreadPoolExecutor(processes, thread_name_prefix="tensorkeep-encode")
        # The last callback runs first: no thread may use a process that is closed.
        stack.callback(threads.shutdown, cancel_futures=True)
        yield lambda texts: threads.submit(encode, texts)


class _Worker:
    """A process that encodes texts. It ends when the connection is closed, and so with this process."""

    def __init__(self, description: bytes, tokenizer: Tokenizer) -> None:
        self._dtype = tokenizer.dtype
        # A socket pair needs one descriptor for both directions.
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        with theirs, store_errors(sys.executable, "start a process that tokenizes"):
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _WORKER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # One thread each: there are as many processes as processors.
                env=os.environ | {"PYTHONPATH": _import_path(), "TOKENIZERS_PARALLELISM": "false"},
                # Ctrl-C interrupts this process only, which then closes the connections.
                process_group=0,
            )
        # The worker builds the tokenizer from its description, as a reader of prepared data does.
        self._send(description)

    def encode(self, texts: list[str]) -> list[Tokens]:
        """Return the tokens of texts; UsageError if one cannot be encoded."""
        self._send(msgspec.msgpack.encode(texts))
        try:
            counts = np.frombuffer(self._connection.recv_bytes(), np.int64)
            answer = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        # No numbers: the answer is an error.
        if not len(counts):
            message, remedy = msgspec.json.decode(answer)
            raise UsageError(message, remedy=remedy)
        tokens = np.frombuffer(answer, self._dtype)
        return np.split(tokens, np.cumsum(counts)[:-1])

    def _send(self, content: bytes) -> None:
        try:
            self._connection.send_bytes(content)
        except OSError as error:
            raise self._ended() from error

    def _ended(self) -> TensorkeepError:
        status = self._status()
        if status is None:
            return StoreError("a process that tokenizes hung", remedy="see its last output, or use one process")
        # The kernel kills a process with SIGKILL if memory runs out.
        if status == -signal.SIGKILL:
            return OutOfMemoryError(
                "a process that tokenizes was killed, probably because memory ran out", remedy="use fewer processes"
            )
        return StoreError(
            f"a process that tokenizes ended with status {status}", remedy="see its last output, or use one process"
        )

    def close(self) -> None:
        self._connection.close()
        self._status()

    def _status(self) -> int | None:
        """Wait for the process, which ends with its connection, and return its status; None if it had to be killed."""
        try:
            return self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return None


def _import_path() -> str:
    return os.pathsep.join(map(os.path.abspath, sys.path))


def main(descriptor: int) -> None:
    """Encode texts for another process until it closes the connection: ``python -m chatgot.data.encoding FD``.

    The descriptor is a socket. It carries the tokenizer, and then lists of texts. The answer to a list is the numbers
    of tokens and all tokens; or nothing, and the message and the remedy of an error.
    """
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


_WRITTEN_AT_ONCE = 1 << 20


def write_tokens(
    reader: CorpusReader, folder: Path, tokenizer: Tokenizer, pieces: Iterator[TextPiece], processes: int | None
) -> dict[str, Split]:
    """Encode the pieces of a corpus, write the tokens of its splits, and return what was written."""
    has_documents, ending = reader.source.has_documents, tokenizer.end_of_document
    documents, begins = dict.fromkeys(SPLITS, 0), True
    found = encoded(tokenizer, pieces, processes or default_processes(tokenizer, reader.source.nbytes))
    with token_files(folder, tokenizer) as files, closing(found):
        for piece, tokens in found:
            before = [*(tokenizer.opening if begins else []), *piece.before]
            after = [*piece.after, *([ending] if piece.ends_document and ending is not None else [])]
            for each in (before, tokens, after):
                if len(each):
                    files[piece.split].add(np.asarray(each, tokenizer.dtype))
            begins = piece.ends_document
            documents[piece.split] += piece.ends_document
        return splits_of(files, documents if has_documents else dict.fromkeys(SPLITS))


def pieces_of(reading: CorpusReader, tokenizer: Tokenizer, rule: SplitRule, characters: int) -> Iterator[TextPiece]:
    """Yield all text of a corpus but empty documents, in pieces that the tokenizer may encode by themselves."""
    for split, texts in rule.split(reading, characters):
        # One text behind: only the last one ends the document.
        before = None
        for text in filter(None, tokenizer.pieces(texts)):
            if before is not None:
                yield TextPiece(split, before, False)
            before = text
        if before is not None:
            yield TextPiece(split, before, reading.source.has_documents)


class TokenFile(Closing):
    """Appends tokens to a new file and computes their checksum; a context manager that closes the file."""

    def __init__(self, path: Path, dtype: np.dtype[np.unsignedinteger]) -> None:
        self.tokens = 0
        self._dtype = dtype
        self._file = DirectFile(path, direct=False)
        self._hasher = checksummed_json.new_hasher(wide=False)
        self._waiting: list[Tokens] = []
        self._waiting_bytes = 0
        self._written = 0

    def add(self, tokens: Tokens) -> None:
        self._waiting.append(tokens)
        self._waiting_bytes += tokens.nbytes
        self.tokens += len(tokens)
        # Many documents are short: one write for several.
        if self._waiting_bytes >= _WRITTEN_AT_ONCE:
            self._write()

    def _write(self) -> None:
        if self._waiting:
            content = np.concatenate(self._waiting, dtype=self._dtype).view(np.uint8)
            self._hasher.update(content)
            self._file.write(self._written, content)
            self._written += content.nbytes
            self._waiting, self._waiting_bytes = [], 0

    def finish(self) -> str:
        """Make the file durable, close it, and return the xxh3-64 of its bytes as 16 hexadecimal digits."""
        self._write()
        self._file.finish(self._written)
        return str(self._hasher.hexdigest())

    def close(self) -> None:
        self._file.close()


@contextmanager
def token_files(folder: Path, tokenizer: Tokenizer) -> Iterator[dict[str, TokenFile]]:
    with ExitStack() as stack:
        yield {split: stack.enter_context(TokenFile(folder / file_name(split), tokenizer.dtype)) for split in SPLITS}


def origin_of(reading: CorpusReader, splits: dict[str, Split], kind: str | None = None) -> CorpusRecord:
    source = reading.source
    return CorpusRecord(
        spec=recorded_path(source.spec),
        kind=kind or source.kind,
        encoding=source.encoding,
        files=len(source.files),
        bytes=reading.nbytes,
        characters=reading.characters,
        documents=sum(each.documents or 0 for each in splits.values()) if source.has_documents else None,
        xxh3_64=reading.digest(),
    )


def splits_of(files: dict[str, TokenFile], documents: Mapping[str, int | None]) -> dict[str, Split]:
    """Make the token files of the splits durable, and return their records."""
    return {
        split: Split(tokens=file.tokens, documents=documents[split], xxh3_64=file.finish())
        for split, file in files.items()
    }


def recorded_path(path: str) -> str:
    # JSON must be valid text, and the name of a file need not be.
    return os.fsencode(path).decode(errors="backslashreplace")


def layout_of(
    origin: CorpusRecord,
    tokenizer: Tokenizer,
    splits: dict[str, Split],
    rule: SplitRule,
    mixture: Sequence[MixturePart] | None = None,
) -> DataManifest:
    return DataManifest(
        format=FORMAT,
        version=VERSION if mixture is None else MIXTURE_VERSION,
        tensorkeep=__version__,
        source=origin,
        tokenizer=tokenizer.as_dict(),
        vocab_size=tokenizer.vocab_size,
        dtype=tokenizer.dtype.name,
        validation=rule.validation,
        seed=rule.seed,
        splits=splits,
        mixture=None if mixture is None else [*mixture],
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))
