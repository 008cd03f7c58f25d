"""Encoding of text: pieces become tokens, in order, in this process or in several."""

import os
import queue
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

import msgspec
import numpy as np

from chatgot.data.tokenizers.base import Tokenizer, Tokens
from chatgot.data.tokenizers.registry import tokenizer_from_dict
from tensorkeep.errors import OutOfMemoryError, StoreError, TensorkeepError, UsageError
from tensorkeep.ext import machine
from tensorkeep.ext.storage import store_errors

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
    """Yield each piece with its tokens, in order; OutOfMemoryError or StoreError if a process ends early."""
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
        import_path = os.pathsep.join(map(os.path.abspath, sys.path))
        with theirs, store_errors(sys.executable, "start a process that tokenizes"):
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _WORKER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # One thread each: there are as many processes as processors.
                env=os.environ | {"PYTHONPATH": import_path, "TOKENIZERS_PARALLELISM": "false"},
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
        # The kernel kills a process with SIGKILL if memory runs out.
        if status == -signal.SIGKILL:
            return OutOfMemoryError(
                "a process that tokenizes was killed, probably because memory ran out", remedy="use fewer processes"
            )
        end = "hung" if status is None else f"ended with status {status}"
        return StoreError(f"a process that tokenizes {end}", remedy="see its last output, or use one process")

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


if __name__ == "__main__":
    main(int(sys.argv[1]))
