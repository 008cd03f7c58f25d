"""Which coder is in use: the environment variable, and installations without the extension."""

import os
import subprocess
import sys

import pytest

from tensorkeep.codecs import coder

WITHOUT_EXTENSION = "import sys; sys.modules['tensorkeep.codecs._coder'] = None; "
MAIN = "import sys; from tensorkeep.cli.main import main; sys.exit(main(['env', '--json']))"


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own: the variable is read once, at import."""
    inherited = {name: value for name, value in os.environ.items() if name != "TENSORKEEP_CODER"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=inherited | environment, timeout=60)


def described(code: str, **environment: str) -> str:
    found = run(f"{code}from tensorkeep.codecs.coder import describe; print(describe())", **environment)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_without_the_extension_the_coder_is_python() -> None:
    assert described(WITHOUT_EXTENSION) == "Python (no compiled coder: numpy + zstandard)"


@pytest.mark.parametrize("value", ["python", ""])
def test_the_variable_chooses(value: str) -> None:
    by_default = described("")
    chosen = {"python": "Python (TENSORKEEP_CODER=python: numpy + zstandard)", "": by_default}
    assert described("", TENSORKEEP_CODER=value) == chosen[value]


@pytest.mark.skipif(coder.compiled is None, reason="the extension is not built, or TENSORKEEP_CODER=python is set")
def test_the_compiled_coder_names_its_instructions() -> None:
    assert described("") == described("", TENSORKEEP_CODER="compiled")
    assert described("") in ("compiled (avx512)", "compiled (avx2)", "compiled (plain)")


@pytest.mark.parametrize(
    ("code", "value", "exit_code", "message"),
    [
        (MAIN, "fast", 2, "TENSORKEEP_CODER='fast' is not a coder"),
        (WITHOUT_EXTENSION + MAIN, "compiled", 7, "this installation has no compiled coder"),
    ],
)
def test_a_coder_that_does_not_exist_is_an_error(code: str, value: str, exit_code: int, message: str) -> None:
    failed = run(code, TENSORKEEP_CODER=value)
    assert failed.returncode == exit_code
    assert message in failed.stdout
    assert "Traceback" not in failed.stdout + failed.stderr


def test_an_extension_of_other_sources_is_an_error() -> None:
    stale = "import sys, types; sys.modules['tensorkeep.codecs._coder'] = types.ModuleType('_coder'); "
    failed = run(stale + MAIN)
    assert failed.returncode == 7
    assert "built from other sources" in failed.stdout and "pip install -e ." in failed.stdout
