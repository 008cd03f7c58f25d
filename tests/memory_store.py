"""An S3 server in the memory of this process: what the clients in the tests ask for, and nothing else.

`storage/objects/test_servers.py` holds it to what independent implementations of S3 answer.
"""

import hashlib
import threading
from collections.abc import Mapping
from email.utils import formatdate
from itertools import count
from time import gmtime, strftime, time
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

MOST_LISTED = 1000


class Reply(NamedTuple):
    """The answer to a request; that to a HEAD request has content as well, whose length is announced."""

    status: int
    headers: list[tuple[str, str]]
    content: bytes


class _Object(NamedTuple):
    content: bytes
    tag: str
    modified: float


class MemoryStore:
    """Buckets of objects; any number of threads may ask at once."""

    def __init__(self) -> None:
        self._buckets: dict[str, dict[str, _Object]] = {}
        self._uploads: dict[str, dict[int, bytes]] = {}
        self._ids = count(1)
        self._lock = threading.Lock()

    def answer(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> Reply:
        """Carry out a request, or refuse it."""
        parts = urlsplit(url)
        bucket, _, key = unquote(parts.path).removeprefix("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        given = {name.lower(): value for name, value in headers.items()}
        with self._lock:
            if not key and method == "PUT":
                if bucket in self._buckets:
                    return _error(409, "BucketAlreadyOwnedByYou")
                self._buckets[bucket] = {}
                return Reply(200, [], b"")
            if bucket not in self._buckets:
                return _error(404, "NoSuchBucket")
            objects = self._buckets[bucket]
            if not key:
                return _listing(objects, query) if method == "GET" else _delete_all(objects, body)
            if "uploads" in query or "uploadId" in query:
                return self._several_parts(method, objects, key, query, given, body)
            if method == "DELETE":
                objects.pop(key, None)
                return Reply(204, [], b"")
            return _put(objects, key, given, body) if method == "PUT" else _get(objects, key, given)

    def _several_parts(
        self,
        method: str,
        objects: dict[str, _Object],
        key: str,
        query: Mapping[str, str],
        headers: Mapping[str, str],
        body: bytes,
    ) -> Reply:
        """Begin an upload in parts, take one of them, or end the upload."""
        if "uploads" in query:
            upload = f"upload-{next(self._ids)}-{key}"
            self._uploads[upload] = {}
            return _xml(f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>")
        if query["uploadId"] not in self._uploads or not query["uploadId"].endswith(f"-{key}"):
            return _error(404, "NoSuchUpload")
        received = self._uploads[query["uploadId"]]
        if method == "PUT":
            received[int(query["partNumber"])] = body
            return Reply(200, [("ETag", _tag(body))], b"")
        if method == "DELETE":
            del self._uploads[query["uploadId"]]
            return Reply(204, [], b"")
        named = [{each.tag.rpartition("}")[2]: each.text for each in part} for part in ElementTree.fromstring(body)]
        parts = {int(part["PartNumber"]): part["ETag"].strip('"') for part in named}
        if [*parts] != sorted(parts) or any(_tag(received.get(each, b"")).strip('"') != parts[each] for each in parts):
            return _error(400, "InvalidPart")
        done = _put(objects, key, headers, b"".join(received[number] for number in parts))
        if done.status != 200:
            return done
        del self._uploads[query["uploadId"]]
        tag = escape(objects[key].tag)
        return _xml(f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>")


def _put(objects: dict[str, _Object], key: str, headers: Mapping[str, str], body: bytes) -> Reply:
    expected = headers.get("if-match")
    if expected and key not in objects:
        return _error(404, "NoSuchKey")
    if (headers.get("if-none-match") and key in objects) or (expected and objects[key].tag != expected):
        return _error(412, "PreconditionFailed")
    objects[key] = _Object(body, _tag(body), time())
    return Reply(200, [("ETag", objects[key].tag)], b"")


def _get(objects: Mapping[str, _Object], key: str, headers: Mapping[str, str]) -> Reply:
    if key not in objects:
        return _error(404, "NoSuchKey")
    content, tag, modified = objects[key]
    if headers.get("if-match", tag) != tag:
        return _error(412, "PreconditionFailed")
    about = [("ETag", tag), ("Last-Modified", formatdate(modified, usegmt=True)), ("Accept-Ranges", "bytes")]
    if "range" not in headers:
        return Reply(200, about, content)
    first, _, last = headers["range"].removeprefix("bytes=").partition("-")
    start = int(first) if first else max(0, len(content) - int(last))
    stop = min(len(content), int(last) + 1) if first and last else len(content)
    if start >= len(content):
        return _error(416, "InvalidRange")
    return Reply(206, [*about, ("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")], content[start:stop])


def _listing(objects: Mapping[str, _Object], query: Mapping[str, str]) -> Reply:
    """List keys below a prefix; with a delimiter, one level of them."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    after = query.get("continuation-token") or query.get("start-after", "")
    found: dict[str, str] = {}
    for key in sorted(key for key in objects if key.startswith(prefix)):
        below, end, _ = key[len(prefix) :].partition(delimiter or "\0")
        if end:
            name = prefix + below + end
            found[name] = f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
        else:
            content, tag, modified = objects[key]
            date = strftime("%Y-%m-%dT%H:%M:%S.000Z", gmtime(modified))
            about = f"<LastModified>{date}</LastModified><ETag>{escape(tag)}</ETag>"
            found[key] = f"<Contents><Key>{escape(key)}</Key><Size>{len(content)}</Size>{about}</Contents>"
    names = [name for name in found if name > after]
    page, more = names[:MOST_LISTED], len(names) > MOST_LISTED
    token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
    return _xml(
        f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}"
        f"{''.join(found[name] for name in page)}</ListBucketResult>"
    )


def _delete_all(objects: dict[str, _Object], body: bytes) -> Reply:
    keys = [each.text or "" for each in ElementTree.fromstring(body).iter() if each.tag.endswith("Key")]
    for key in keys:
        objects.pop(key, None)
    deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
    return _xml(f"<DeleteResult>{deleted}</DeleteResult>")


def _tag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


def _xml(content: str) -> Reply:
    return Reply(200, [("Content-Type", "application/xml")], f'<?xml version="1.0"?>{content}'.encode())


def _error(status: int, code: str) -> Reply:
    return Reply(status, [], f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())
