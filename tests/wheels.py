"""Build the wheel and the source distribution of each package, check their files, and try each package alone.

    python tests/wheels.py dist [PYTHON ...]

A package is installed from its wheel into an environment that has nothing of Tensorkeep; pip adds the packages that it
depends on. Then all source distributions are installed where no compiler is found. Each installation is tried
(``smoke_packages.py``), and the compiled coder and the coder in Python read what the other wrote (``smoke_wheel.py``).
That is done with each PYTHON, by default with the one that runs this; the last line names the supported versions that
were not tried.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import tomllib
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "packages"
# In the order in which they import each other.
NAMES = ("tensorkeep", "tensorkeep-formats", "chatgot", "tensorkeep-bench")
# A package is tried in an environment with the dependencies of others of the environment before.
BASES = {"tensorkeep-formats": "tensorkeep", "chatgot": "tensorkeep", "tensorkeep-bench": "chatgot"}
EXTENSION = "tensorkeep/codecs/_coder.abi3.so"
MOST_BYTES = 100_000
# What setuptools adds to a source distribution.
GENERATED = re.compile(r"PKG-INFO|setup\.cfg|src/\w+\.egg-info/.*")
# Neither the checkout nor settings of the one who runs this.
BARE = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TENSORKEEP"))}
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
# Modules are compiled when they are imported: most of those of torch never are.
INSTALL = ["install", "--no-compile", "-c", str(ROOT / "constraints.txt")]


def project(name: str) -> dict[str, Any]:
    """Return the content of a package's pyproject.toml."""
    return tomllib.loads((PACKAGES / name / "pyproject.toml").read_text())


def module_of(name: str) -> str:
    """Return the name of the Python package, which files of a distribution begin with as well."""
    return name.replace("-", "_")


def only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    assert len(found) == 1, f"{folder} has {len(found)} files {pattern}, not 1"
    return found[0]


def tracked(folder: Path) -> set[str]:
    """Return the paths of the files below a folder that git tracks, relative to it."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=folder, check=True, capture_output=True, text=True)
    return {name for name in names.stdout.split("\0") if name}


def run(command: list[str], folder: Path, environment: dict[str, str] = BARE) -> None:
    subprocess.run(command, cwd=folder, env=environment, check=True)


class Environment:
    """A virtual environment without pip: the pip of this interpreter installs into it."""

    def __init__(self, folder: Path, interpreter: str) -> None:
        self.folder = folder
        self.interpreter = interpreter
        self.python = str(folder / "bin" / "python")

    def make(self) -> "Environment":
        run([self.interpreter, "-m", "venv", "--without-pip", str(self.folder)], self.folder.parent)
        return self

    def copy(self, name: str) -> "Environment":
        """Return an environment with the same files, except those of Tensorkeep."""
        other = Environment(self.folder.with_name(name), self.interpreter)
        # Hard links: torch has half a gigabyte.
        own = shutil.ignore_patterns("tensorkeep*", "chatgot*")
        shutil.copytree(self.folder, other.folder, symlinks=True, copy_function=os.link, ignore=own)
        return other

    def pip(self, command: str, *words: str, environment: dict[str, str] = BARE) -> None:
        run([*PIP, "--python", self.python, command, "-qq", *words], self.folder.parent, environment)

    def smoke(self, name: str, *words: str) -> None:
        """Run a script of this folder in a new folder, so that it meets nothing of the checkout."""
        with tempfile.TemporaryDirectory(dir=self.folder.parent) as folder:
            run([self.python, "-P", str(ROOT / "tests" / name), *words], Path(folder))

    @property
    def site_packages(self) -> Path:
        return only(self.folder, "lib/python*/site-packages")


def build(dist: Path, folder: Path) -> Path:
    """Build all packages, with nothing but what they require for that; return a folder with wheels of the sources.

    Those wheels are built from the source distributions where no compiler is found.
    """
    required = {each for name in NAMES for each in project(name)["build-system"]["requires"]}
    builder = Environment(folder / "builder", sys.executable).make()
    builder.pip(*INSTALL, "build", *sorted(required))
    for name in NAMES:
        # The wheel is built from the source distribution.
        command = [builder.python, "-m", "build", "-qq", "--no-isolation", "--outdir", str(dist), str(PACKAGES / name)]
        run(command, folder)
    (folder / "no-programs").mkdir()
    without_compiler = {each: value for each, value in BARE.items() if each != "CC"} | {"PATH": f"{folder}/no-programs"}
    built = folder / "from-sources"
    words = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(built), *map(str, sorted(dist.glob("*.tar.gz")))]
    builder.pip("wheel", *words, environment=without_compiler)
    for name in NAMES:
        # Without the extension, the wheel is for any platform.
        only(built, f"{module_of(name)}-*-py3-none-any.whl")
    return built


def check_wheel(name: str, wheel: Path) -> None:
    """Check the tag and the files of a wheel: the Python package, as git tracks it, and the extension."""
    module, extension = module_of(name), {EXTENSION} if name == "tensorkeep" else set()
    platform = sysconfig.get_platform().partition("-")[2].replace("-", "_")
    tag = f"cp311-abi3-*{platform}" if extension else "py3-none-any"
    assert Path(wheel.name).match(f"{module}-*-{tag}.whl"), f"{wheel.name} is not for {tag}"
    with zipfile.ZipFile(wheel) as archive:
        files = {each.filename: each.file_size for each in archive.infolist()}
    packaged = {each for each in files if ".dist-info/" not in each}
    source = {f"{module}/{each}" for each in tracked(PACKAGES / name / "src" / module)}
    assert packaged == source | extension, f"{wheel.name} differs from git: {sorted(packaged ^ (source | extension))}"
    assert files.get(EXTENSION, 0) <= MOST_BYTES, f"the extension has {files[EXTENSION]} bytes"


def check_source(name: str, source: Path) -> None:
    """Check that a source distribution has every file that git tracks below the package's folder, and no other."""
    with tarfile.open(source) as archive:
        files = {each.name.partition("/")[2] for each in archive.getmembers() if each.isfile()}
    files = {each for each in files if not GENERATED.fullmatch(each)}
    expected = tracked(PACKAGES / name)
    assert files == expected, f"{source.name} differs from git: {sorted(files ^ expected)}"


def check_same(name: str, wheel: Path, environment: Environment) -> None:
    """Check that pip has installed the files of this wheel, and not a package of the same name from an index."""
    with zipfile.ZipFile(wheel) as archive:
        for each in archive.namelist():
            installed = environment.site_packages / each
            assert each.endswith("/RECORD") or installed.read_bytes() == archive.read(each), f"{installed} is another"


def install(name: str, wheels: Path, environment: Environment) -> None:
    environment.pip(*INSTALL, "--find-links", str(wheels), str(only(wheels, f"{module_of(name)}-*.whl")))
    for each in NAMES:
        if list(environment.site_packages.glob(f"{module_of(each)}-*.dist-info")):
            check_same(each, only(wheels, f"{module_of(each)}-*.whl"), environment)


def try_wheels(dist: Path, interpreter: str, folder: Path) -> Environment:
    """Install each package beside those that it depends on, and try it; return the environment with all of them."""
    environments: dict[str, Environment] = {}
    for name in NAMES:
        if name in BASES:
            environments[name] = environments[BASES[name]].copy(name)
        else:
            environments[name] = Environment(folder / name, interpreter).make()
        install(name, dist, environments[name])
        environments[name].smoke("smoke_packages.py", name)
        if name == "tensorkeep":
            environments[name].smoke("smoke_wheel.py", "compiled", str(folder / "by-wheel"))
    return environments[name]


def try_sources(built: Path, environment: Environment, folder: Path) -> None:
    """Install what was built without a compiler in the place of the wheels, and try all packages."""
    environment.pip("uninstall", "-y", *NAMES)
    install(NAMES[-1], built, environment)
    environment.smoke("smoke_wheel.py", "Python", str(folder / "by-python"), str(folder / "by-wheel"))
    for name in NAMES:
        environment.smoke("smoke_packages.py", name, *["together"] * (name != NAMES[-1]))


def supported_versions() -> list[str]:
    """Return the versions of Python that the packages say they support, such as ``3.11``."""
    classifiers = project("tensorkeep")["project"]["classifiers"]
    versions = (each.removeprefix("Programming Language :: Python :: 3.") for each in classifiers)
    return [f"3.{minor}" for minor in versions if minor.isdecimal()]


def described(interpreter: str) -> list[str]:
    """Return the version and the path of an interpreter."""
    program = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable, sep='\\n')"
    return subprocess.run([interpreter, "-c", program], check=True, capture_output=True, text=True).stdout.splitlines()


def try_all(dist: Path, built: Path, interpreter: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        environment = try_wheels(dist, interpreter, folder)
        try_sources(built, environment, folder)
        # The compiled coder reads what the coder in Python wrote.
        first = Environment(folder / NAMES[0], interpreter)
        first.smoke("smoke_wheel.py", "compiled", "by-wheel-again", str(folder / "by-python"))


def main(folder: str, *interpreters: str) -> None:
    dist = Path(folder).resolve()
    shutil.rmtree(dist, ignore_errors=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        built = build(dist, Path(temporary).resolve())
        for name in NAMES:
            wheel, source = only(dist, f"{module_of(name)}-*.whl"), only(dist, f"{module_of(name)}-*.tar.gz")
            check_wheel(name, wheel)
            check_source(name, source)
            print(f"{wheel.name}: {wheel.stat().st_size:,} bytes; {source.name}: {source.stat().st_size:,} bytes")
        print(f"built and checked in {time.monotonic() - begin:.0f} s", flush=True)
        untried = supported_versions()
        for interpreter in interpreters or (sys.executable,):
            begin, (version, python) = time.monotonic(), described(interpreter)
            assert version in untried, f"{interpreter} is Python {version}, not one of {', '.join(untried)}"
            try_all(dist, built, python)
            untried.remove(version)
            print(f"Python {version}: all installed and tried in {time.monotonic() - begin:.0f} s", flush=True)
    if untried:
        print(f"not tried with Python {' and '.join(untried)}: make wheel PYTHONS='python{' python'.join(untried)}'")


if __name__ == "__main__":
    main(*sys.argv[1:])
