"""What the recipes talk to: a server like the hub of Hugging Face, and stand-ins for experiment trackers."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace
from typing import Any

_COMMIT = "0" * 40


class _Hub(BaseHTTPRequestHandler):
    """One repository of small files, by the requests of huggingface_hub 2."""

    files: dict[str, bytes]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        address = f"http://{self.headers['Host']}/you/model"
        if "/preupload/" in self.path:
            # "regular": the content comes with the commit, and not from a store of large files.
            mode = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            self._json({"files": [each | mode for each in json.loads(body)["files"]]})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self._json({"commitOid": _COMMIT, "commitUrl": f"{address}/commit/{_COMMIT}"})
        else:
            self._json({"url": address})

    def do_GET(self) -> None:
        if "/resolve/" in self.path:
            content = self.files[self.path.partition(f"/resolve/{_COMMIT}/")[2]]
            self._answer(content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": _COMMIT})
        elif "/tree/" in self.path:
            items = self.files.items()
            self._json([{"type": "file", "oid": _COMMIT, "size": len(data), "path": name} for name, data in items])
        else:
            self._json({"id": "you/model", "sha": _COMMIT, "siblings": [{"rfilename": name} for name in self.files]})

    def do_HEAD(self) -> None:
        self.do_GET()

    def _json(self, answer: Any) -> None:
        self._answer(json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _answer(self, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def hub() -> Iterator[str]:
    """Serve an empty repository; yield the URL of the hub."""
    handler = type("Hub", (_Hub,), {"files": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Artifact:
    """Stands in for ``wandb.Artifact`` of version 0.31."""

    def __init__(self, name: str, type: str, metadata: dict[str, Any]) -> None:
        self.references: dict[str, str] = {}

    def add_reference(self, uri: str, name: str) -> None:
        assert uri.startswith(("file:///", "s3://")), uri
        self.references[name] = uri


def wandb() -> SimpleNamespace:
    """Return a stand-in for the module ``wandb``, with the ``logged`` artifacts."""
    logged: list[Artifact] = []
    run = SimpleNamespace(log_artifact=logged.append)
    return SimpleNamespace(Artifact=Artifact, init=lambda project: nullcontext(run), logged=logged)


def mlflow() -> SimpleNamespace:
    """Return a stand-in for the module ``mlflow``, with the ``tags`` and ``metrics`` of a run."""
    tags: dict[str, str] = {}
    metrics: dict[int, dict[str, float]] = {}
    return SimpleNamespace(
        start_run=nullcontext,
        set_tag=tags.__setitem__,
        log_metrics=lambda values, step: metrics.update({step: values}),
        tags=tags,
        metrics=metrics,
    )
