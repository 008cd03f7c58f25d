"""The structure of the source: who imports whom, sizes of files and folders, the annotated tree in the docs."""

import ast
import re
import subprocess
import sys
import textwrap
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tensorkeep"
CODER = ROOT / "src" / "coder"

# A layer imports those with a smaller number. `codecs` and `io` must not import each other.
ORDER = """
errors units closing paths placeholder plugins structs supported version
machine
state
codecs io
formats
checkpoint
distributed torch safetensors train
bench
report
show
cli
testing
"""
LAYERS = {name: number for number, names in enumerate(ORDER.strip().splitlines()) for name in names.split()}

MOST_FILES = 14
MOST_LINES = 350
# One file per technique and per command: the list is the point.
LISTS = {"train/techniques", "cli"}


def modules() -> dict[str, Path]:
    """Return the files of the package by the name under which they are imported."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ("tensorkeep", *path.relative_to(SOURCE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


# Only these are parsed: parsing whole files would take most of the time.
IMPORT = re.compile(r"^[ \t]*((?:from|import) tensorkeep\b(?:[^(\n]*\([^)]*\)|[^\n]*))", re.MULTILINE)


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


def layer(module: str) -> str:
    return module.split(".")[1] if "." in module else module


MODULES = modules()
# The package itself hands out public names, which it imports on first use.
INSIDE = MODULES.keys() - {"tensorkeep", "tensorkeep.__main__"}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    """Return what each module imports."""
    return {module: imports(MODULES[module], set(MODULES)) - {module, "tensorkeep"} for module in INSIDE}


def test_imports_point_to_lower_layers(graph: dict[str, set[str]]) -> None:
    for module in INSIDE:
        own = layer(module)
        for other in {layer(target) for target in graph[module]} - {own}:
            below = LAYERS[other] < LAYERS[own] or LAYERS[own] == LAYERS[other] == 0
            assert below, f"{module}: {own} must not import {other}"


def test_no_circles_of_imports(graph: dict[str, set[str]]) -> None:
    TopologicalSorter(graph).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}).prepare()


def test_the_import_check_can_fail(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    inner = "try:\n    pass\nfinally:\n    if True:\n        from tensorkeep.cli import main\n"
    file.write_text(f"from tensorkeep.checkpoint.save.save import save\n{inner}")
    assert imports(file, set(MODULES)) == {"tensorkeep.checkpoint.save.save", "tensorkeep.cli.main"}


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


def test_folders_are_small_and_files_short_with_names_that_say_what_is_in_them() -> None:
    for folder in {path.parent for path in MODULES.values()}:
        if str(folder.relative_to(SOURCE)) not in LISTS:
            assert len(list(folder.glob("*.py"))) <= MOST_FILES, folder
    for path in [*MODULES.values(), *CODER.iterdir()]:
        assert len(path.read_text().splitlines()) <= MOST_LINES, path
    for module in MODULES:
        assert not {"utils", "helpers", "common", "misc"} & set(module.split(".")), module


def docstring(path: Path) -> str | None:
    """Return the docstring of a module, or the comment with which a C file begins."""
    found = re.match(r'"""(.*?)"""|/\*(.*?)\*/', path.read_text(), re.DOTALL)
    return found and re.sub(r"\n *\*? *", "\n", found[1] or found[2]).strip()


def summary(path: Path) -> str:
    """Return the first paragraph of the docstring of a module, on one line."""
    text = docstring(path)
    assert text, f"{path} has no docstring"
    return " ".join(text.split("\n\n")[0].split()).rstrip(".")


def tree(folder: Path = SOURCE, indent: str = "  ") -> list[str]:
    """Return the annotated tree of a folder, a line for each file."""
    files = [path for path in folder.iterdir() if path.suffix in (".py", ".c", ".h")]
    files.sort(key=lambda path: (path.name != "__init__.py", path.name))
    width = max((len(path.name) for path in files), default=0)
    lines = []
    for path in files:
        line = f"{indent}{path.name:<{width}}  {summary(path)}"
        below = " " * (len(indent) + width + 2)
        lines += textwrap.wrap(line, 118, subsequent_indent=below, break_long_words=False, break_on_hyphens=False)
    for inner in sorted(path for path in folder.iterdir() if list(path.rglob("*.py"))):
        lines += [f"{indent}{inner.name}/", *tree(inner, indent + "  ")]
    return lines


def whole_tree() -> list[str]:
    return ["src/coder/", *tree(CODER), "src/tensorkeep/", *tree()]


def test_the_tree_in_the_docs_is_the_tree() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    block = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    assert block is not None
    assert block[1].splitlines() == whole_tree(), "run `python tests/test_tree.py` to update it"


def test_files_named_in_the_architecture_page_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## The tree")[0]
    named = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?)`", text)
    assert len(named) > 40
    for name in named:
        assert (ROOT / "src" / "tensorkeep" / name).exists(), name


if __name__ == "__main__":
    page = ROOT / "docs" / "architecture.md"
    written = "\n".join(whole_tree())
    page.write_text(re.sub(r"```text\n.*?```", lambda _: f"```text\n{written}\n```", page.read_text(), flags=re.DOTALL))
    sys.exit()
