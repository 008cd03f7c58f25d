"""Run the commands of a page: those of Tensorkeep in this process, and those that need a shell in bash."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from documentation.blocks import PACKAGES, ROOT, Command, extras_of
from tensorkeep.cli.main import main

_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_SHELL = re.compile(r"[|<>&;*$~`(]|^\w+=|^(?!(tensorkeep|chatgot)\b)")
_MODEL = "--model.n_layers 1 --model.n_heads 2 --model.d_model 16 --model.context_length 128"
_STEPS = (
    "--loop.steps 20 --loop.batch_size 2 --loop.gradient_accumulation_steps 1 --schedule.warmup_steps 2 "
    "--default_techniques none"
)
_SMALL = f"{_STEPS} --eval.batches 1 --checkpoint.every 4 --checkpoint.keep_last 99"
_QUICK = "--runs 1 --budget 1"
_TINY = "openllama-3b:scale=0.0005:float16"

SHORTER: tuple[tuple[str, str], ...] = (
    (r" train .*--init-from", _SMALL),
    (r" train (shakespeare|chatgot)", f"{_SMALL} {_MODEL}"),
    (r" train gpt2.* --data corpus", f"{_SMALL} {_MODEL} --data.tokenizer byte"),
    (r" train gpt2", f"{_SMALL} {_MODEL}"),
    (r"tensorkeep demo", "--rounds 1 --no-progress"),
    (r"tensorkeep tune checkpoint", "--seconds 1 --size 64MB"),
    (r"tensorkeep tune training", "--predict-only"),
    (r"tensorkeep bench checkpoint .*--from .*--out", f"{_QUICK} --arms pytorch"),
    (r"tensorkeep bench checkpoint .*--from", _QUICK),
    (r"tensorkeep bench checkpoint", f"{_QUICK} --model {_TINY}"),
    (r"tensorkeep bench training --recipe", f'{_QUICK} --steps 8 --arms "only fused-optimizer"'),
    (r"tensorkeep bench training", f"{_QUICK} --steps 8"),
    (r"python packages/tensorkeep-bench/benchmarks/coder_rates.py", "--rounds 1 --dtypes bfloat16"),
)
"""What is appended to a command so that it ends in seconds: options of its own are kept, and those of the first row
whose pattern it matches are added."""

_NUMBERS_OF_STEPS = re.compile(r"(?<=--loop\.steps )\d+00\b|(?<=@)\d{2,}00\b|(?<=--eval\.every )\d+00\b")
"""Numbers of steps, which are divided by 100."""

STAND_INS = {
    "tiktoken:gpt2": "byte",  # downloaded
    "gpt2-124m --memory 4GB": "chatgot-small-char --memory 4GB",  # its tokenizer is that of tiktoken
    "openllama-3b:first-100:float16": _TINY,
    "openllama-3b:first-5:float16": _TINY,
    "--loop.steps 600000": "--loop.steps 40",
    "--techniques.compile.mode max-autotune": "--techniques.compile.backend aot_eager",
    '"only compile"': '"only fused-cross-entropy"',  # compiles for minutes
    " packages/tensorkeep-bench/benchmarks/": f" {ROOT}/packages/tensorkeep-bench/benchmarks/",
    "(2_000_000)": "(1_000_000)",  # values, which a command of the page sorts as text
    '"/nvme/run"': '"nvme/run"',
    '"/nfs/': '"nfs/',
}
"""What is too large for a test or needs a network, and what it uses instead."""


def as_tested(command: str) -> str:
    """Return a command of the documentation as the tests run it: with fewer steps and smaller models."""
    line = command.partition(" #")[0].rstrip()
    added = next((options for pattern, options in SHORTER if re.search(pattern, line)), "")
    line = with_stand_ins(line)
    line = _NUMBERS_OF_STEPS.sub(lambda match: match[0][:-2], line)
    for option in re.findall(r'--\S+ "[^"]+"|--\S+ ?[^-]\S*|--\S+', added):
        if option.split()[0] not in line:
            line += f" {option.strip()}"
    return line


def with_stand_ins(text: str) -> str:
    """Return a text of the documentation with what the tests use instead of what is too large or elsewhere."""
    for name, other in STAND_INS.items():
        text = text.replace(name, other)
    return text


def run(command: Command, page: str) -> None:
    """Run a command in the current folder; fail unless it succeeds."""
    line = as_tested(command.text)
    words = shlex.split(line)
    if words[0] == "make":
        line = shlex.join(["make", "-n", "-C", str(ROOT), *words[1:]])
    elif words[:2] == ["pip", "install"]:
        _check_installation(words[2:])
        return
    if command.typed or _SHELL.search(_QUOTED.sub("", line)):
        code = _in_shell(line, "".join(f"{text}\n" for text in command.typed))
    else:
        code = main(words[1:], name=words[0])
    # A comparison that finds a difference exits with 1.
    allowed = {0, 1} if words[:2] == ["tensorkeep", "diff"] else {0}
    assert code in allowed, f"{page}: `{command.text}`, run as `{line}`, exited with {code}"


def _in_shell(line: str, typed: str) -> int:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shell = ["bash", "-euo", "pipefail", "-c", line]
    return subprocess.run(shell, input=typed, text=True, env={**os.environ, "PATH": path}, check=False).returncode


def _check_installation(words: list[str]) -> None:
    """Check a ``pip install`` from a clone: the folders exist, and the extras are those of each package.

    None of these packages is on PyPI, where a stranger could publish the name: a command must name the folders of all
    that it installs, so it names tensorkeep, which the others need.
    """
    installed = set()
    for word in words:
        assert not re.match(r"\.(\[|$)|tensorkeep|chatgot", word), f"{word} is not the folder of a package"
        named = re.fullmatch(r"\./packages/([\w*-]+)(?:\[([\w,]+)\])?", word)
        assert named or not word.startswith("./"), word
        if named:
            folders = list(PACKAGES.glob(named[1]))
            assert folders, word
            wanted = set(named[2].split(",")) if named[2] else set()
            assert all(wanted <= extras_of(folder.name) for folder in folders), word
            installed |= {folder.name for folder in folders}
    assert not installed or "tensorkeep" in installed, words
    if "-c" in words:
        assert (ROOT / words[words.index("-c") + 1]).is_file()
        # It pins a version. Without the index, that is PyPI's build with CUDA.
        assert "--extra-index-url" in words, words
