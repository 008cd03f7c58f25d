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
from collections.abc import Sequence
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


def pytest(arguments: Sequence[str], record: Path) -> tuple[int, dict[str, set[str]]]:
    """Run tests; return the exit code, and what was recorded of them."""
    record.unlink(missing_ok=True)
    python_path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest", "-p", "share", f"--record={record}", *arguments]
    code = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": python_path}).returncode
    found = json.loads(record.read_text()) if record.exists() else {}
    return code, {name: set(found.get(name, ())) for name in ("collected", "done", "failed", "not collected")}


def run(arguments: Sequence[str], changed: Sequence[str], day: int, folder: Path) -> int:
    """Run the tests, and once more, alone, those that failed; return the exit code."""
    record, only = folder / "record.json", folder / "only.json"
    code, first = pytest([f"--day={day}", *(f"--changed={path}" for path in changed), *arguments], record)
    failed, left = first["failed"], first["collected"] - first["done"]
    if code == 0 or first["not collected"] or not (failed or left):
        return code
    if left:
        print(f"\nCI: a worker ended; the {len(left)} tests that it left out run now", flush=True)
        only.write_text(json.dumps(sorted(left)))
        code, second = pytest([f"--only={only}", *arguments], record)
        failed |= second["failed"]
        if second["collected"] - second["done"] or (code and not second["failed"]):
            print("\nCI: FAILED, as tests were left out again")
            return code or 1
    if len(failed) > MOST_FAILED:
        print(f"\nCI: FAILED, {len(failed)} tests")
        return 1
    again = set()
    for node_id in sorted(failed):
        print(f"\nCI: {node_id} has failed and runs once more, alone", flush=True)
        only.write_text(json.dumps([node_id]))
        code, found = pytest([f"--only={only}", *arguments, "-n", "0", node_id.partition("::")[0]], record)
        if code or found["done"] != {node_id}:
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
