"""The examples in docstrings run, and what users import has examples."""

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import tensorkeep

SOURCE = Path(tensorkeep.__file__).parent
WITH_EXAMPLES = [path for path in sorted(SOURCE.rglob("*.py")) if "    >>> " in path.read_text()]
# The page of errors, `docs/reference/errors.md`, has their examples.
PUBLIC = [name for name in tensorkeep.__all__ if not name.startswith("__") and not name.endswith("Error")]


@pytest.mark.integration
@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_examples_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parts = ("tensorkeep", *path.relative_to(SOURCE).with_suffix("").parts)
    module = importlib.import_module(".".join(part for part in parts if part != "__init__"))
    failed, tried = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert tried
    assert not failed


def test_public_functions_and_classes_have_examples() -> None:
    documentation = {name: inspect.getdoc(getattr(tensorkeep, name)) or "" for name in PUBLIC}
    assert [name for name, text in documentation.items() if "Examples\n--------" not in text] == []
