"""A gate before which saves wait."""

import threading
from collections.abc import Iterator

import pytest

from tensorkeep.storage.commit import Commit


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Delay every save before it becomes visible, until the event is set."""
    event = threading.Event()
    real = Commit.publish

    def publish(commit: Commit, manifest: bytes | None = None) -> None:
        event.wait()
        real(commit, manifest)

    monkeypatch.setattr(Commit, "publish", publish)
    yield event
    event.set()
