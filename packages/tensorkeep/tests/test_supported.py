"""Where tensorkeep cannot work, importing it raises one error with a remedy."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("machine", "message", "remedy"),
    [
        ("sys.platform = 'darwin'", "does not run on darwin; supported: Linux on x86-64", "container"),
        ("sys.platform = 'win32'", "does not run on win32; supported: Linux on x86-64", "WSL 2"),
        ("sys.version_info = (3, 10, 13, 'final', 0)", "does not run on Python 3.10;", "install Python 3.11 or later"),
        ("sys.maxsize = 2**31 - 1", "does not run on a 32-bit Python;", "install a 64-bit Python"),
        ("sys.byteorder = 'big'", "does not run on a big-endian processor;", "use x86-64 or AArch64"),
    ],
)
def test_an_import_elsewhere_names_the_platform_and_a_remedy(machine: str, message: str, remedy: str) -> None:
    # The command line imports the package first, and shows the same error.
    for imported in ("tensorkeep", "tensorkeep.cli.main"):
        program = f"import sys; {machine}; import {imported}"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        first, second = done.stderr.splitlines()[-2:]
        assert first.startswith(f"ImportError: tensorkeep {message}")
        assert remedy in second
