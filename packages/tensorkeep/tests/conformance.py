"""What the tests of each package do with the conformance suites of its formats."""

from pathlib import Path
from typing import Any

import pytest

from tensorkeep.testing.format_suite import FormatSuite, training_state


def check_writing(
    suite: type[FormatSuite], tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the tests of a suite that depend on the way of writing."""
    checks = suite()
    checks.test_states_round_trip(tmp_path_factory.mktemp("states"))
    checks.test_every_torch_dtype_round_trips(tmp_path_factory.mktemp("torch"))
    checks.test_every_numpy_dtype_round_trips(tmp_path_factory.mktemp("numpy"))
    path = checks.destination(tmp_path_factory.mktemp("saved"))
    checks.save(training_state(), path)
    checks.test_shared_storage_is_restored(path)
    checks.test_a_truncated_file_never_gives_a_wrong_value(path)
    checks.check_flipped_bits(path, 5)
    checks.test_a_missing_file_is_detected(path)
    checks.test_a_failing_disk_leaves_the_old_checkpoint("pwrite", tmp_path_factory.mktemp("failing"), monkeypatch)


def check_flipped_bits(suite: type[FormatSuite], folder: Path, record_property: Any) -> None:
    """Flip a bit in 250 bytes of each file; record how many cases there are."""
    checks = suite()
    path = checks.destination(folder)
    checks.save(training_state(), path)
    record_property("cases", checks.check_flipped_bits(path, 250))
