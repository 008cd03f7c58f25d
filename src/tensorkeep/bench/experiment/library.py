"""Experiments by name (those that ship with Tensorkeep) or by path (JSON files)."""

import json
import os
import re
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

from tensorkeep.bench.experiment import file, suite_file
from tensorkeep.bench.experiment.plan import Plan
from tensorkeep.bench.experiment.workload import get_workload
from tensorkeep.errors import UsageError, did_you_mean

MAX_FILE_BYTES = 1 << 20

# A string, closed or not, or a comment; outside of strings, JSON has no slash. Possessive, to stay linear in time.
_STRING_OR_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*+"?|//[^\n]*', re.DOTALL)


def shipped(workload: str | None = None) -> dict[str, str]:
    """Return the titles of the experiments that ship with Tensorkeep, all or those of a workload, by name."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in _shipped_files()}
    return {name: each["title"] for name, each in found.items() if workload in (None, each["workload"])}


def read_experiment(name_or_path: str | os.PathLike[str], *, check_arms: bool = True) -> Plan:
    """Return the plan of an experiment: one that ships with Tensorkeep, or a JSON file.

    The file is an experiment, or the configuration of an isolated suite. A name takes precedence over a file, which
    ``./name`` is. Unless ``check_arms`` is false, the workload, which is then imported, validates every arm.

    Raises UsageError if the experiment does not exist or is not valid; the message names the file, the place and the
    field.
    """
    path = _find(name_or_path)
    value = read_json(path)
    plan = suite_file.read(value, path) if suite_file.recognises(value) else file.read(value, path)
    if check_arms:
        workload = get_workload(plan.experiment.workload)
        for arm in plan.arms:
            try:
                workload.parse_arm(arm.settings)
            except UsageError as error:
                message = f"arm {arm.name!r}: {error.message}"
                raise UsageError(message, path=path, remedy=error.remedy or "correct the settings") from error
    return plan


def _find(name_or_path: str | os.PathLike[str]) -> Path:
    name = os.fspath(name_or_path)
    found = {path.stem: path for path in _shipped_files()}
    if isinstance(name_or_path, str) and name in found:
        return found[name]
    path = Path(name)
    if path.suffix == ".json" or os.sep in name or path.is_file():
        return path
    remedy = f"{did_you_mean(name, found, 'experiments')} (or give the path of a JSON file)"
    raise UsageError(f"the experiment {name!r} does not exist", remedy=remedy)


def _shipped_files() -> list[Path]:
    return sorted(Path(str(files("tensorkeep") / "experiments")).glob("*.json"))


def read_json(path: Path) -> object:
    """Return the content of a JSON file, which may have ``//`` comments.

    Raises UsageError if the file cannot be read, is too large, is not JSON, or gives a key twice.
    """
    try:
        with path.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        remedy = "give the name of an experiment, or the path of a JSON file"
        raise UsageError(f"cannot read the experiment: {error.strerror}", path=path, remedy=remedy) from error
    if len(content) > MAX_FILE_BYTES:
        message = f"is larger than {MAX_FILE_BYTES:,} bytes, too large for an experiment"
        raise UsageError(message, path=path, remedy="give an experiment, not results")
    try:
        # Comments become blanks, so that the positions in error messages stay correct.
        commented = content.decode("utf-8-sig")
        text = _STRING_OR_COMMENT.sub(lambda m: " " * len(m[0]) if m[0].startswith("//") else m[0], commented)
        value: object = json.loads(text, object_pairs_hook=_unique_keys)
        # Half of a surrogate pair or an infinite number could not be written to the results.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UsageError(f"is not JSON: {reason}", path=path, remedy="correct the file") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {repeated!r} appears twice in one object")
    return found
