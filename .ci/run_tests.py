"""Run the tests of CI: all of `make test`, and of the exhaustive tests those whose turn it is (`share.py`).

    python .ci/run_tests.py [--base REVISION] [ARGUMENT OF PYTEST ...]

A test that fails runs once more, alone, after all others. If it passes then, it is reported as flaky, and the run
passes. If a worker ends, the tests that it left out run after the others.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_FAILED = 10
"""So many failures are a defect, not chance."""


def git(*words: str) -> list[str]:
    """Return the lines that a command of git prints; none if it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


def changed_files(base: str | None) -> list[str]:
    """Return the files that differ from a revision.

    By default it is where the branch left ``origin/main``; on that branch itself, the last commit of the day before.
    """
    if base is None:
        fork, head = git("merge-base", "origin/main", "HEAD"), git("rev-parse", "HEAD")
        earlier = git("rev-list", "-1", "--before=1.day", "HEAD") or git("rev-parse", "HEAD~1")
        base = next(iter(fork if fork and fork != head else earlier), "HEAD")
    return sorted({*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")})


@dataclass(frozen=True)
class Ended:
    """How a run of pytest ended, and the names of tests and workers that `share.Recorder` has recorded."""

    code: int
    collected: set[str]
    done: set[str]
    passed: set[str]
    failed: set[str]
    failed_at_end: set[str]
    not_collected: set[str]
    broken_workers: set[str]
    workers: set[str]

    @property
    def is_trusted(self) -> bool:
        """Whether tests failed at most: pytest, a file and the end of a worker did not."""
        return self.code in (0, 1, 2) and not (self.not_collected or self.broken_workers)


def pytest(arguments: Sequence[str], record: Path) -> Ended:
    """Run tests; return the exit code, and what was recorded of them."""
    record.unlink(missing_ok=True)
    python_path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest", "-p", "share", f"--record={record}", *arguments]
    code = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": python_path}).returncode
    found = json.loads(record.read_text()) if record.exists() else {}
    return Ended(code, **{each.name: set(found.get(each.name, ())) for each in fields(Ended) if each.name != "code"})


def run(arguments: Sequence[str], changed: Sequence[str], day: int, folder: Path) -> int:
    """Run the tests, and once more, alone, those that failed; return the exit code."""
    record, only = folder / "record.json", folder / "only.json"

    def some(names: Iterable[str], *more: str) -> Ended:
        only.write_text(json.dumps(sorted(names)))
        return pytest([f"--only={only}", *arguments, *more], record)

    first = pytest([f"--day={day}", *(f"--changed={path}" for path in changed), *arguments], record)
    failed, at_end, left = first.failed, first.failed_at_end, first.collected - first.done
    if not first.is_trusted or not (failed or left):
        if first.broken_workers:
            print(f"\nCI: FAILED, as workers ended with an error: {', '.join(sorted(first.broken_workers))}")
        return first.code or (0 if first.is_trusted else 1)
    if left:
        print(f"\nCI: a worker ended; the {len(left)} tests that it left out run now", flush=True)
        second = some(left)
        failed, at_end = failed | second.failed, at_end | second.failed_at_end
        if not second.is_trusted or left - second.done or (second.code and not second.failed):
            print("\nCI: FAILED, as tests were left out again")
            return second.code or 1
    if len(failed) > MOST_FAILED:
        print(f"\nCI: FAILED, {len(failed)} tests")
        return 1
    again = set()
    # With a worker where the first run had some: the group of a test is known to workers alone.
    workers = ["-n", "1"] if first.workers else []
    for node_id in sorted(failed):
        file = node_id.partition("::")[0]
        # The end of a module fails with its last test, which may not be the one that is to blame.
        names = {each for each in first.collected if each.startswith(f"{file}::")} if node_id in at_end else {node_id}
        print(
            f"\nCI: {node_id} has failed and runs once more, {'with its file' if len(names) > 1 else 'alone'}",
            flush=True,
        )
        found = some(names, *workers, file)
        if found.code or not found.is_trusted or node_id not in found.passed:
            again.add(node_id)
    for node_id in sorted(failed):
        print(f"CI: {'FAILED TWICE' if node_id in again else 'FLAKY (failed, then passed alone)'}: {node_id}")
    return 1 if again else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", metavar="REVISION", help="what the change is compared with")
    options, arguments = parser.parse_known_args()
    changed, day = changed_files(options.base), date.today().timetuple().tm_yday
    print(f"CI: {len(changed)} changed files, day {day} of the year", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        return run(arguments, changed, day, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
