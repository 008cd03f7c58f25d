"""The C coder built with AddressSanitizer and UndefinedBehaviorSanitizer: the tests of codecs, and fuzzers for a while.

    python packages/tensorkeep/tests/coder/sanitized.py [MINUTES]

Of the minutes, 10 unless given, the fuzzer in C (``fuzzer.c``) takes four fifths, and the comparison with zstandard
(``oracle.py``) the rest. Each starts from a new seed, and prints what it counted. Without a compiler that has these
sanitizers it prints so and runs nothing.
"""

import os
import secrets
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODER = ROOT / "src" / "coder"
FUZZER = Path(__file__).parent / "fuzzer.c"
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
OPTIONS = ["-std=c11", "-O1", "-g", *SANITIZERS]
# Leaks are Python's own, which frees little when it ends. What numpy allocates must be seen, too.
ENVIRONMENT = {"ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc", "TENSORKEEP_CODER": "compiled"}


def run(*command: str | Path, seconds: float = 1800, **environment: str) -> None:
    print("$", shlex.join(map(str, command)), flush=True)
    try:
        failed = subprocess.run(command, cwd=ROOT, env=os.environ | environment, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        sys.exit(f"sanitizers: the command above did not end in {seconds:.0f} s")
    if failed:
        sys.exit(f"sanitizers: the command above failed with exit code {failed}")


def library() -> str | None:
    """Return the path of AddressSanitizer's library, which must be loaded first; None if it is not there."""
    if shutil.which("gcc") is None:
        return None
    found = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    return found.stdout.strip() if Path(found.stdout.strip()).is_absolute() else None


def build(folder: Path) -> None:
    """Build the fuzzer, and a copy of the package with the extension."""
    package = folder / "tensorkeep"
    shutil.copytree(ROOT / "src" / "tensorkeep", package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    module, *coder = sorted(CODER.glob("*.c"), key=lambda path: path.name != "module.c")
    extension = package / "codecs" / "_coder.abi3.so"
    python = ["-DPy_LIMITED_API=0x030B0000", "-I", sysconfig.get_path("include"), "-shared", "-fPIC"]
    run("gcc", *OPTIONS, *python, module, *coder, "-o", extension)
    run("gcc", *OPTIONS, FUZZER, *coder, "-o", folder / "fuzzer")


def main(minutes: float) -> None:
    sanitizer = library()
    if sanitizer is None:
        message = "sanitizers: SKIPPED, as gcc with AddressSanitizer (libasan) is not installed"
        if os.environ.get("CI"):
            sys.exit(message)
        print(message)
        return
    seed, seconds = str(secrets.randbits(32)), 60 * minutes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder)
        paths = os.pathsep.join(map(str, [folder, ROOT / "tests", ROOT.parents[1] / "tests"]))
        python = ENVIRONMENT | {"LD_PRELOAD": sanitizer, "PYTHONPATH": paths}
        tests = [
            *("-q", "-n", "0", "--hypothesis-profile", "sanitized"),
            "tests/codecs",
            "tests/coder",
        ]
        run(sys.executable, "-m", "pytest", "-m", "not exhaustive", *tests, **python)
        limit = seconds + 300
        run(folder / "fuzzer", str(int(0.8 * seconds)), seed, seconds=limit, **ENVIRONMENT)
        run(sys.executable, "-m", "coder.oracle", str(0.2 * seconds), seed, seconds=limit, **python)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 10)
