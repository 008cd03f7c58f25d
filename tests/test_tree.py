"""The structure of the source: who imports whom, names of modules, files that the architecture page names."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tensorkeep.version import __version__

ROOT = Path(__file__).parents[1]
PACKAGES = ROOT / "packages"
CODER = PACKAGES / "tensorkeep" / "src" / "coder"

# Each package may import the ones that are named after it. Within a package, a layer imports those above it here; the
# modules of a first layer may import each other.
ORDER = {
    "tensorkeep": """
        errors units closing paths placeholder plugins structs variables version
        machine
        state
        codecs storage
        formats
        ranks
        runs
        checkpoint
        manager
        distributed torch safetensors pages
        integrations
        cli
        ext testing
    """,
    "tensorkeep_formats": """
        tensorstore
        t5x
    """,
    "chatgot": """
        settings
        model optim
        config
        data
        step export
        techniques generate
        run memory
        loop scoring
        cli testing
    """,
    "tensorkeep_bench": """
        results statistics wording
        workload design analysis
        experiment checkpoint
        run
        demo training
        report tune
        cli
    """,
}
MAY_IMPORT = {
    "tensorkeep": (),
    "tensorkeep_formats": ("tensorkeep",),
    "chatgot": ("tensorkeep",),
    "tensorkeep_bench": ("tensorkeep", "tensorkeep_formats", "chatgot"),
}
# What other packages import from tensorkeep: its public names, and one door to the rest.
PUBLIC = re.compile(r"tensorkeep|tensorkeep\.(errors|ext|torch|safetensors|distributed|testing)(\.\w+)*")
LAYERS = {
    (package, name): number
    for package, order in ORDER.items()
    for number, names in enumerate(order.strip().splitlines())
    for name in names.split()
}


def modules() -> dict[str, Path]:
    """Return the files of the packages by the name under which they are imported."""
    found = {}
    for source in PACKAGES.glob("*/src"):
        for path in sorted(source.rglob("*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


# Only these are parsed: parsing whole files would take most of the time.
IMPORT = re.compile(r"^[ \t]*((?:from|import) (?:tensorkeep|chatgot)\w*\b(?:[^(\n]*\([^)]*\)|[^\n]*))", re.MULTILINE)


def imports(path: Path, known: set[str]) -> set[str]:
    """Return the modules of the package that a file imports, anywhere in it, for type checking included."""
    found = set()
    for node in ast.parse("\n".join(IMPORT.findall(path.read_text()))).body:
        assert isinstance(node, ast.Import | ast.ImportFrom)
        names = {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names = {full if (full := f"{node.module}.{name}") in known else str(node.module) for name in names}
        found |= names & known
    return found


def layer(module: str) -> tuple[str, str]:
    """Return the package of a module, and the module or folder in it."""
    package, _, rest = f"{module}.".partition(".")
    return package, rest.partition(".")[0] or package


MODULES = modules()
# A package itself hands out public names, which it imports on first use.
INSIDE = {name for name in MODULES if "." in name and not name.endswith("__main__")}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """Return what each module imports."""
    return {module: imports(MODULES[module], set(MODULES)) - {module} for module in INSIDE}


def test_imports_point_to_lower_layers(graph: dict[str, set[str]]) -> None:
    for module in INSIDE:
        own = layer(module)
        for other in {layer(target) for target in graph[module] & INSIDE} - {own}:
            if other[0] == own[0]:
                below = LAYERS[other] < LAYERS[own] or LAYERS[own] == LAYERS[other] == 0
                assert below, f"{module}: {own} must not import {other}"


def test_packages_use_the_names_that_others_offer(graph: dict[str, set[str]]) -> None:
    used = set()
    for module in INSIDE:
        package = layer(module)[0]
        for target in graph[module]:
            other = layer(target)[0]
            assert other == package or other in MAY_IMPORT[package], f"{module} must not import {target}"
            if "tensorkeep" == other != package:
                assert PUBLIC.fullmatch(target), f"{module} imports {target}: use tensorkeep.ext"
                used.add(target)
    assert "tensorkeep.ext" in used
    assert [name for name in INSIDE if name.startswith("tensorkeep.ext.") and name not in used] == []


def test_the_door_to_tensorkeep_has_no_name_that_no_package_uses() -> None:
    sources = [path.read_text() for name, path in MODULES.items() if layer(name)[0] != "tensorkeep"]
    named = {name for text in sources for name in re.findall(r"\w+", "\n".join(IMPORT.findall(text)))}
    for name in [name for name in INSIDE if layer(name)[1] == "ext"]:
        assert set(importlib.import_module(name).__all__) - named == set(), name


def test_versions_licences_and_platforms_are_the_same() -> None:
    projects = [tomllib.loads(path.read_text())["project"] for path in PACKAGES.glob("*/pyproject.toml")]
    assert {project["version"] for project in projects} == {__version__} and len(projects) == 4
    for project in projects:
        own = [each for each in project["dependencies"] if re.match("tensorkeep|chatgot", each)]
        assert all(each.endswith(f"=={__version__}") for each in own), own
    assert len({path.read_bytes() for path in [ROOT / "LICENSE", *PACKAGES.glob("*/LICENSE")]}) == 1
    # What pip checks, what the index shows, what an import checks, and what CI runs.
    assert {project["requires-python"] for project in projects} == {">=3.11"}
    platform = re.compile(r"Operating System :: .*|Programming Language :: Python :: 3.*")
    [platforms] = {tuple(filter(platform.fullmatch, project["classifiers"])) for project in projects}
    versions = [each.rpartition(" ")[2] for each in platforms if re.search(r"3\.\d+$", each)]
    assert platforms[0] == "Operating System :: POSIX :: Linux"
    assert versions[0] == "3.11" and "Python 3.11 or later" in MODULES["tensorkeep"].read_text()
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    assert f'python: ["{versions[0]}", "{versions[-1]}"]' in workflow
    interpreters = [f"cp{each.replace('.', '')}-manylinux*" for each in (versions[0], versions[-1])]
    core = tomllib.loads((PACKAGES / "tensorkeep" / "pyproject.toml").read_text())
    assert core["tool"]["cibuildwheel"]["build"] == interpreters


def test_no_circles_of_imports(graph: dict[str, set[str]]) -> None:
    TopologicalSorter(graph).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}).prepare()


def test_the_import_check_can_fail(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    inner = "try:\n    pass\nfinally:\n    if True:\n        from tensorkeep.cli import main\n"
    file.write_text(f"from tensorkeep.checkpoint.saving import save\nfrom chatgot.loop import train\n{inner}")
    assert imports(file, set(MODULES)) == {"tensorkeep.checkpoint.saving", "tensorkeep.cli.main", "chatgot.loop"}


@pytest.mark.integration
def test_structs_are_prepared_before_threads_decode_them() -> None:
    """Two threads that use one for the first time would end the process; see ``structs.py``."""
    call = r"msgspec\.\w+\.Decoder\((?!prep|list|record)|msgspec\.convert\((?!.*prep)|decode\(.*type=(?!prep|\w+\[)"
    assert {path.name for path in MODULES.values() if re.search(call, path.read_text())} == {"structs.py"}
    text = "msgspec.convert(x, kind)\nmsgspec.json.decode(y, type=_State)\nmsgspec.json.Decoder(sealed.Content[Root])"
    assert len(re.findall(call, text)) == 3
    code = (
        "import sys, threading, msgspec; from tensorkeep.structs import prepared; sys.setswitchinterval(1e-6)\n"
        "def use(kind, barrier): barrier.wait(); msgspec.convert({}, prepared(kind))\n"
        "for _ in range(100):\n"
        "    kind = msgspec.defstruct('S', [(f'f{n}', int, n) for n in range(50)]); barrier = threading.Barrier(4)\n"
        "    threads = [threading.Thread(target=use, args=(kind, barrier)) for _ in range(4)]\n"
        "    [each.start() for each in threads]; [each.join() for each in threads]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def folder_circles(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Return the pairs of folders that import each other."""
    # A module beside the folders, such as `errors` or `torch`, counts as a folder of its own.
    folder = {module: str(MODULES[module].parent).partition("/src/")[2] for module in graph}
    folder = {module: name if "/" in name else module for module, name in folder.items()}
    edges = {(folder[module], folder[target]) for module in graph for target in graph[module] if target in folder}
    return {(one, other) for one, other in edges if one < other and (other, one) in edges}


def test_no_two_folders_import_each_other(graph: dict[str, set[str]]) -> None:
    assert folder_circles(graph) == set()
    one, other = "tensorkeep.storage.commit", "tensorkeep.cli.main"
    circle = {one: {other}, other: {one}}
    assert folder_circles(circle) == {("tensorkeep/cli", "tensorkeep/storage")}


def test_modules_have_a_docstring_and_a_name_that_says_what_is_in_them() -> None:
    for path in [*MODULES.values(), *CODER.iterdir()]:
        assert re.match(r'"""\S|/\*', path.read_text()), f"{path} has no docstring"
    for module in MODULES:
        assert not {"utils", "helpers", "common", "misc"} & set(module.split(".")), module


def test_files_named_in_the_architecture_page_exist() -> None:
    """The paths of the tours begin at the package; the paths of a table begin in the package that its head names."""
    package, named = "", 0
    for line in (ROOT / "docs" / "architecture.md").read_text().splitlines():
        if head := re.match(r"\| `([a-z-]+)`: to change", line):
            package = head[1]
        for name in re.findall(r"`((?:[a-z_]+/)*[a-z0-9_]+\.(?:py|js)|(?:[a-z_]+/)+)`", line):
            places = [f"*/src/{name}", *([f"{package}/src/*/{name}"] if package else [])]
            assert any(any(PACKAGES.glob(place)) for place in places), name
            named += 1
    assert named > 100
