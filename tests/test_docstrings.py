"""The examples in docstrings run, and what users import has examples."""

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import tensorkeep

ROOT = Path(__file__).parents[1]
SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))
# The part of a path below `src` is the name of a module.
WITH_EXAMPLES = {str(path).partition("/src/")[2]: path for path in SOURCES if "    >>> " in path.read_text()}
# The page of errors, `docs/reference/errors.md`, has their examples.
PUBLIC = [name for name in tensorkeep.__all__ if not name.startswith("__") and not name.endswith("Error")]


@pytest.mark.integration
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        module = importlib.import_module(name.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    except tensorkeep.MissingExtraError as error:
        pytest.skip(str(error))
    failed, tried = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert tried
    assert not failed


def test_public_functions_and_classes_have_examples() -> None:
    documentation = {name: inspect.getdoc(getattr(tensorkeep, name)) or "" for name in PUBLIC}
    assert [name for name, text in documentation.items() if "Examples\n--------" not in text] == []
