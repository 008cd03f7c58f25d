"""Which coder is in use: the environment variable, and installations without the extension."""

import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from types import ModuleType

import pytest

import tensorkeep.codecs
from tensorkeep.codecs import coder
from tensorkeep.errors import TensorkeepError
from tensorkeep.testing.cases import case

EXTENSION = "tensorkeep.codecs._coder"
BUILT = find_spec(EXTENSION) is not None
BY_DEFAULT = ("compiled (avx512)", "compiled (avx2)", "compiled (plain)")
NONE = ("Python (no compiled coder: numpy + zstandard)",)
PYTHON = ("Python (TENSORKEEP_CODER=python: numpy + zstandard)",)


def imported(variable: str | None, extension: object) -> ModuleType:
    """Return the coder's module as a new process imports it: it reads the variable and looks for the extension."""
    with pytest.MonkeyPatch.context() as patches:
        if variable is None:
            patches.delenv("TENSORKEEP_CODER", raising=False)
        else:
            patches.setenv("TENSORKEEP_CODER", variable)
        if extension != "installed":
            patches.delattr(tensorkeep.codecs, "_coder", raising=False)
            patches.setitem(sys.modules, EXTENSION, extension)
        spec = spec_from_file_location("imported_again", coder.__file__)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def test_the_variable_and_the_installation_choose() -> None:
    for variable, extension, described in (
        (None, "installed", BY_DEFAULT if BUILT else NONE),
        ("", "installed", BY_DEFAULT if BUILT else NONE),
        *([("compiled", "installed", BY_DEFAULT)] if BUILT else []),
        ("python", "installed", PYTHON),
        (None, None, NONE),
        ("python", None, PYTHON),
    ):
        with case(f"{variable}, {extension}"):
            assert imported(variable, extension).describe() in described


def test_a_coder_that_does_not_exist_is_an_error() -> None:
    for variable, extension, exit_code, words in (
        ("fast", "installed", 2, "TENSORKEEP_CODER='fast' is not a coder"),
        ("compiled", None, 7, "this installation has no compiled coder"),
        (None, ModuleType("_coder"), 7, r"built from other sources(?s:.*)pip install \./packages/tensorkeep"),
    ):
        with case(words):
            with pytest.raises(TensorkeepError, match=words) as caught:
                imported(variable, extension)
            assert caught.value.exit_code == exit_code


@pytest.mark.integration
def test_commands_show_the_error_of_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORKEEP_CODER", "fast")
    command = [sys.executable, "-m", "tensorkeep", "env", "--json"]
    failed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert failed.returncode == 2
    assert "is not a coder" in failed.stdout
    assert "Traceback" not in failed.stdout + failed.stderr
