"""Check the wheel and the source distribution of a folder, and install both into empty environments.

    python tests/wheels.py dist [PYTHON ...]

The wheel is installed with its dependencies; the source distribution beside it, where no compiler is found. Each must
read what the other wrote (``smoke_wheel.py``). That is done with each PYTHON, by default with the one that runs this;
the last line names the supported versions that were not tried.
"""

import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTENSION = "tensorkeep/codecs/_coder.abi3.so"
MOST_BYTES = 100_000


def only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    assert len(found) == 1, f"{folder} has {len(found)} files {pattern}, not 1"
    return found[0]


def check_wheel(wheel: Path) -> None:
    """Check the tag and the files of a wheel with the extension."""
    platform = sysconfig.get_platform().partition("-")[2].replace("-", "_")
    assert "-cp311-abi3-" in wheel.name and wheel.stem.endswith(platform), f"{wheel.name} is not for cp311-abi3 here"
    with zipfile.ZipFile(wheel) as archive:
        files = {each.filename: each.file_size for each in archive.infolist()}
    packaged = {name for name in files if ".dist-info/" not in name}
    source = {str(path.relative_to(ROOT / "src")) for path in tracked("packages/tensorkeep/src/tensorkeep")}
    assert packaged == source | {EXTENSION}, f"the wheel's files differ: {sorted(packaged ^ source)}"
    assert files[EXTENSION] <= MOST_BYTES, f"the extension has {files[EXTENSION]} bytes"
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, of which the extension has {files[EXTENSION]:,}, unpacked")


def check_source(source: Path) -> None:
    """Check that a source distribution has everything that git tracks, except for what only the repository needs."""
    with tarfile.open(source) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    missing = {str(path.relative_to(ROOT)) for path in tracked(".") if path.name != ".gitignore"} - files
    missing = {name for name in missing if not name.startswith(".github/")}
    assert not missing, f"the source distribution lacks {sorted(missing)}"
    assert not [name for name in files if name.endswith((".so", ".pyc"))]
    print(f"{source.name}: {source.stat().st_size:,} bytes")


def tracked(folder: str) -> list[Path]:
    names = subprocess.run(["git", "ls-files", "-z", folder], cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in names.stdout.split("\0") if name]


def supported_versions() -> list[str]:
    """Return the versions of Python that the package says it supports, such as ``3.11``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = (each.removeprefix("Programming Language :: Python :: 3.") for each in project["classifiers"])
    return [f"3.{minor}" for minor in versions if minor.isdecimal()]


def described(interpreter: str) -> list[str]:
    """Return the version and the path of an interpreter."""
    program = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable, sep='\\n')"
    return subprocess.run([interpreter, "-c", program], check=True, capture_output=True, text=True).stdout.splitlines()


def try_both(wheel: Path, source: Path, interpreter: str, folder: Path) -> None:
    """Install the wheel into a new environment and the source without a compiler, and let each read the other's."""
    (folder / "no-programs").mkdir()
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TENSORKEEP"))}
    without_compiler = {name: value for name, value in bare.items() if name != "CC"} | {"PATH": f"{folder}/no-programs"}
    run([interpreter, "-m", "venv", "venv"], folder, bare)
    python = str(folder / "venv" / "bin" / "python")
    # Modules are compiled when they are imported: most of those of torch never are.
    install = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-compile"]
    run([*install, "-c", str(ROOT / "constraints.txt"), str(wheel)], folder, bare)
    run([*install, "--no-deps", "--target", str(folder / "pure"), str(source)], folder, without_compiler)
    assert not list((folder / "pure").rglob("*.so")), "the extension was built without a compiler"
    assert "Root-Is-Purelib: true" in only(folder / "pure", "*.dist-info/WHEEL").read_text()
    smoke = [python, "-P", str(ROOT / "tests" / "smoke_wheel.py")]
    pure = bare | {"PYTHONPATH": str(folder / "pure")}
    run([str(folder / "venv" / "bin" / "tensorkeep"), "--version"], folder, bare)
    run([*smoke, "compiled", "by-wheel"], folder, bare)
    run([*smoke, "Python", "by-pure-python", "by-wheel"], folder, pure)
    run([*smoke, "compiled", "by-wheel-again", "by-pure-python"], folder, bare)


def run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    subprocess.run(command, cwd=folder, env=environment, check=True)


def main(dist: str, *interpreters: str) -> None:
    wheel, source = only(Path(dist).resolve(), "*.whl"), only(Path(dist).resolve(), "*.tar.gz")
    check_wheel(wheel)
    check_source(source)
    untried = supported_versions()
    for interpreter in interpreters or (sys.executable,):
        begin, (version, python) = time.monotonic(), described(interpreter)
        assert version in untried, f"{interpreter} is Python {version}, not one of {', '.join(untried)}"
        with tempfile.TemporaryDirectory() as folder:
            try_both(wheel, source, python, Path(folder).resolve())
        untried.remove(version)
        print(f"Python {version}: both installed and tried in {time.monotonic() - begin:.0f} s")
    if untried:
        print(f"not tried with Python {' and '.join(untried)}: make wheel PYTHONS='python{' python'.join(untried)}'")


if __name__ == "__main__":
    main(*sys.argv[1:])
