"""Try one installed package of Tensorkeep, beside no other than those that it depends on.

    python -P tests/smoke_packages.py tensorkeep|tensorkeep-formats|chatgot|tensorkeep-bench [together]

It runs in an empty folder, where it leaves its files. With ``together``, other packages may be installed. An error is
an exit code other than 0.
"""

import io
import json
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import distributions
from pathlib import Path

import torch

import tensorkeep
from tensorkeep.cli.main import main as command_line

CHECKOUT = Path(__file__).resolve().parents[1]
# Each package, the packages that it needs, and the check of its use.
NEEDS = {
    "tensorkeep": {"tensorkeep"},
    "tensorkeep-formats": {"tensorkeep", "tensorkeep-formats"},
    "chatgot": {"tensorkeep", "chatgot"},
    "tensorkeep-bench": {"tensorkeep", "tensorkeep-formats", "chatgot", "tensorkeep-bench"},
}
TEXT = "she sells sea shells on the sea shore; " * 60
TINY = [
    *("--model.n_layers", "1", "--model.n_heads", "2", "--model.d_model", "16", "--model.context_length", "16"),
    *("--loop.batch_size", "2", "--schedule.warmup_steps", "1", "--eval.every", "5", "--checkpoint.every", "5"),
]


def script(*words: str) -> str:
    """Return what a program in the environment's folder of scripts prints."""
    program = Path(sysconfig.get_path("scripts"), words[0])
    return subprocess.run([program, *words[1:]], check=True, capture_output=True, text=True).stdout


def call(*words: str, code: int = 0) -> tuple[str, str]:
    """Return the standard output and the errors of a command, which runs in this process."""
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        found = command_line(words)
    assert found == code, f"tensorkeep {' '.join(words)}: exit code {found}, not {code}\n{errors.getvalue()}"
    return output.getvalue(), errors.getvalue()


def check_named(packages: Sequence[str], *words: str) -> None:
    """Check that a command names the packages to install, with the exit code of what is not supported."""
    _, errors = call(*words, code=7)
    installation = "in a clone of Tensorkeep: pip install " + " ".join(f"./packages/{each}" for each in packages)
    assert installation in errors.splitlines(), f"tensorkeep {' '.join(words)}: {errors}"


def build_state() -> dict[str, object]:
    return {"model": {"weight": torch.arange(4096.0).reshape(64, 64).bfloat16(), "bias": torch.ones(7)}, "step": 3}


def check_same(path: Path | str) -> None:
    loaded, state = tensorkeep.load(path), build_state()
    assert loaded["step"] == 3
    assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in state["model"].items())


def try_library() -> None:
    """Save, load, verify, convert and show; every command is one of the table."""
    tensorkeep.save(build_state(), "first")
    check_same("first")
    assert tensorkeep.verify("first")
    call("convert", "first", "second", "--compression", "lossless")
    call("diff", "first", "second")
    call("verify", "second")
    assert "tensors" in call("info", "second")[0]
    with tensorkeep.CheckpointManager("run/checkpoints") as manager:
        manager.save(1, build_state(), metrics={"loss": 2.0})
    assert "steps" in json.loads(call("log", "run", "--json")[0])
    assert tensorkeep.__version__ in script("tensorkeep", "--version")


def try_without_siblings() -> None:
    """Check that what belongs to another package names it."""
    text = " ".join(script("tensorkeep", "--help").replace("│", " ").split())
    assert "Train a model, resume a run, or branch from one. (needs chatgot)" in text, text
    assert "Measure on this machine, and recommend what to use. (needs tensorkeep-bench)" in text, text
    assert "needs chatgot" in call("train", "--help")[0]
    # It needs two packages that are not installed either.
    bench = ["chatgot", "tensorkeep-formats", "tensorkeep-bench"]
    check_named(["chatgot"], "train", "shakespeare-char-cpu", "--data", "text", "--out", "run")
    check_named(bench, "bench", "checkpoint", "--list")
    check_named(bench, "demo")
    # The first bytes of files that the formats write.
    folders = {
        "zarr2": {".zgroup": b"{}", "weight/.zarray": b"{}"},
        "zarr2-array": {".zarray": b"{}"},
        "zarr2-arrays": {"weight/.zarray": b"{}"},
        "zarr3": {"zarr.json": b"{}"},
        "ocdbt": {"manifest.ocdbt": b"\x0c\xdb\x3a\x2a"},
        "t5x": {"checkpoint": b"\x83\xa7version\x03", "target.weight/.zarray": b"{}"},
        "t5x-run": {"checkpoint_100/checkpoint": b"\x82\xa9optimizer\x80"},
    }
    for folder, files in folders.items():
        for name, content in files.items():
            Path("elsewhere", folder, name).parent.mkdir(parents=True, exist_ok=True)
            Path("elsewhere", folder, name).write_bytes(content)
        check_named(["tensorkeep-formats"], "info", f"elsewhere/{folder}")
    check_named(["tensorkeep-formats"], "info", "first", "--format", "tensorstore")
    check_named(["tensorkeep-formats"], "convert", "first", "third", "--to", "t5x")
    check_named(["tensorkeep-formats"], "convert", "first", "third.zarr")
    # A run of ChatGoT: its steps are listed, its segments are not known.
    Path("run/run.json").write_text("{}")
    assert "segments of the run are not known, because chatgot is not installed" in call("log", "run")[0]


def try_formats() -> None:
    """Write and read each format."""
    choices: dict[str, dict[str, object]] = {
        "zarr3.zarr": {},
        "zarr2": {"format": "tensorstore", "zarr": 2},
        "ocdbt": {"format": "tensorstore", "kvstore": "ocdbt"},
        "t5x": {"format": "t5x"},
    }
    for name, options in choices.items():
        tensorkeep.save(build_state(), name, **options)  # type: ignore[arg-type]
        check_same(name)
        assert tensorkeep.verify(name)
    call("convert", "t5x", "back", "--to", "native")
    check_same("back")
    call("info", "ocdbt")


def try_trainer() -> None:
    """Train five steps, resume for five more, and generate."""
    Path("text").write_text(TEXT)
    assert "resume" in script("chatgot", "train", "--help")
    train = ["train", "shakespeare-char-cpu", "--data", "text", "--out", "trained", *TINY, "--json"]
    assert json.loads(call(*train, "--loop.steps", "5")[0])["step"] == 5
    ended = json.loads(call("train", "--out", "trained", "--resume", "--loop.steps", "10", "--json")[0])
    assert (ended["step"], ended["reason"]) == (10, "done"), ended
    generated = call("generate", "trained", "--prompt", "she ", "--tokens", "5", "--json")[0]
    assert json.loads(generated), generated
    assert "segments" in json.loads(call("log", "trained", "--json")[0])


def try_bench() -> None:
    """List the experiments, and write the report of a file with results."""
    assert "six-way" in call("bench", "checkpoint", "--list")[0]
    results = CHECKOUT / "packages" / "tensorkeep-bench" / "benchmarks" / "results" / "isolated-bfloat16.json.gz"
    call("report", str(results), "--out", "report.html")
    assert "<svg" in Path("report.html").read_text()


TRIALS = {
    "tensorkeep": [try_library],
    "tensorkeep-formats": [try_formats],
    "chatgot": [try_trainer],
    "tensorkeep-bench": [try_bench],
}


def main(package: str, together: str = "") -> None:
    found = {each.name for each in distributions()} & NEEDS.keys()
    assert found == NEEDS[package] or (together and found > NEEDS[package]), f"installed are {sorted(found)}"
    assert not Path(tensorkeep.__file__).resolve().is_relative_to(CHECKOUT / "packages"), tensorkeep.__file__
    for trial in TRIALS[package]:
        trial()
    if found == {"tensorkeep"}:
        try_without_siblings()
    print(f"{package}: tried beside {', '.join(sorted(found - {package})) or 'no other package'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
