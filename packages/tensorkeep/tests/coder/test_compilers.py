"""The C coder with every compiler that is installed, for other processors as well: no warnings, the same bytes."""

import os
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

SOURCE = Path(__file__).parents[2] / "src" / "coder"
DRIVER = Path(__file__).parent / "driver.c"
WARNINGS = ["-std=c11", "-Wall", "-Wextra", "-Wconversion", "-Werror"]
SANITIZERS = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover"]
# The command that compiles, with its options, and the one that runs the result.
COMPILERS: dict[str, tuple[list[str], list[str]]] = {
    "cc": (["cc", "-O3"], []),
    "clang": (["clang", "-O3"], []),
    "sanitizers": (["cc", *SANITIZERS], []),
    "aarch64": (["aarch64-linux-gnu-gcc", "-O3", "-static"], ["qemu-aarch64"]),
}


def need(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{program} is not installed")


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@cache
def hashes(compiler: str, folder: Path) -> dict[str, str]:
    """Return the hash of what the driver wrote, by the instructions that it used."""
    (compile, emulator), program = COMPILERS[compiler], folder / compiler
    need(compile[0], *emulator)
    coder = [path for path in sorted(SOURCE.glob("*.c")) if path.name != "module.c"]
    run(*compile, *WARNINGS, "-I", SOURCE, DRIVER, *coder, "-o", program)
    return dict(line.split() for line in run(*emulator, program).splitlines())


@pytest.mark.exhaustive
@pytest.mark.parametrize("compiler", COMPILERS)
def test_every_processor_and_compiler_writes_the_same(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    found = hashes(compiler, folder)
    assert "plain" in found
    assert set(found.values()) == {hashes("cc", folder)["plain"]}


HEADERS = ["-DPy_LIMITED_API=0x030B0000", "-isystem", sysconfig.get_path("include")]
# Functions that Python calls have parameters that some do not need.
MODULE_WARNINGS = [*WARNINGS, "-Wno-unused-parameter"]


def test_every_source_is_free_of_warnings() -> None:
    need("cc")
    run("cc", *MODULE_WARNINGS, *HEADERS, "-fsyntax-only", *sorted(SOURCE.glob("*.c")))


@pytest.mark.exhaustive
@pytest.mark.parametrize("compiler", ["cc", "clang", "aarch64-linux-gnu-gcc"])
def test_the_module_compiles_without_warnings(compiler: str, tmp_path: Path) -> None:
    """Optimized, as some warnings need the flow of the data."""
    need(compiler)
    built = tmp_path / "module.o"
    run(compiler, "-O3", *MODULE_WARNINGS, *HEADERS, "-c", SOURCE / "module.c", "-o", built)
    assert built.stat().st_size > 0


def test_a_big_endian_processor_is_refused() -> None:
    need("cc")
    big = ["-Wno-builtin-macro-redefined", "-U__BYTE_ORDER__", "-D__BYTE_ORDER__=__ORDER_BIG_ENDIAN__"]
    refused = subprocess.run(["cc", *big, "-fsyntax-only", SOURCE / "frame.c"], capture_output=True, text=True)
    assert refused.returncode != 0
    assert "little-endian" in refused.stderr
