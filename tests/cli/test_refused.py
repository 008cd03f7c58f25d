"""Wrong arguments of every command: an error of one line, a remedy, an exit code, and nothing is written."""

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tensorkeep.testing.cases import case
from tensorkeep.testing.format_suite import names_in
from tensorkeep_bench.experiment import read_experiment

REFUSED = {
    "train {} --data text.txt --out run": [
        ("shakespear-char-cpu", 2, "did you mean 'shakespeare-char-cpu'?"),
        ("", 2, "no recipe is given"),
        ("shakespeare-char-cpu --optm.lr 1", 2, "did you mean --optim.lr"),
        ("--resum shakespeare-char-cpu", 2, "did you mean --resume?"),
        ("shakespeare-char-cpu --outt x", 2, "did you mean --out?"),
        ("shakespeare-char-cpu --no-resume", 2, "there is no option --no-resume"),
        ("--recipe shakespeare-char-cpu", 2, "give the recipe as a word"),
        ("shakespeare-char-cpu --loop.steps", 2, "--loop.steps has no value"),
        ("shakespeare-char-cpu shakespeare-char-cpu", 2, "is not a setting"),
        ("shakespeare-char-cpu --data.source stdlib", 2, "which is the same setting"),
        ("shakespeare-char-cpu --optim.lr inf", 2, "optim.lr is 'inf'"),
        ("shakespeare-char-cpu --sample.top_k 0", 2, "sample.top_k is '0'"),
        ("shakespeare-char-cpu --checkpoint.compression nonsense", 2, "there is no compression 'nonsense'"),
        ("shakespeare-char-cpu --checkpoint.memory_budget nonsense", 2, "'nonsense' is not a size"),
        ("shakespeare-char-cpu --eval.patience 3 --eval.every 0", 2, "eval.every is 0"),
        ("shakespeare-char-cpu --schedule.name range", 2, "schedule.warmup_steps is 100"),
        ("shakespeare-char-cpu --data.tokenizer bite", 2, "did you mean 'byte'?"),
        ("shakespeare-char-cpu --data.vocab_size 300", 2, "has a fixed vocabulary size"),
        ("shakespeare-char-cpu --loop.device meta", 2, "the device 'meta' cannot be used"),
        ("shakespeare-char-cpu --model.context_length 100000", 2, "a context of 100,000 needs"),
        ("shakespeare-char-cpu --loop.device cuda:99", 2, "the device 'cuda:99' cannot be used"),
        ("--resume", 5, "contains no run to resume"),
        ("--branch no-such-run", 5, "holds no run"),
    ],
    "train {} --out run": [("shakespeare-char-cpu --data no-such-file", 5, "no-such-file")],
    "train shakespeare-char-cpu --loop.device cpu --data text.txt --out run {}": [
        ("--technique compil", 7, "there is no technique named 'compil'\ndid you mean --technique compile?"),
        ("--technique fused_optimizer", 7, "did you mean --technique fused-optimizer?"),
        ("--technique swiglu", 7, "did you mean --techniques.activation-function.activation swiglu"),
        ("--technique combo-a", 7, "did you mean the combination? --technique A"),
        ("--max_iters 9", 2, "there is no option --max_iters\ndid you mean --loop.steps?"),
        ("--compile", 2, "did you mean --technique compile?"),
        ("--technique b", 7, "there is no technique named 'b'\ndid you mean the combination? --technique B"),
        ("--techniques.A on", 7, "did you mean the combination? --technique A"),
        ("--techniques.compil off", 7, "there is no technique named 'compil'\ndid you mean --technique compile?"),
        ("--techniques.compil.mode default", 7, "there is no technique named 'compil'"),
        ("--technique ''", 2, "--technique '' names no technique\nomit it, or give a name"),
        ("--technique ' , '", 2, "--technique ' , ' names no technique"),
        ("--technique A --technique B", 2, "--technique specified multiple times"),
        ("--technique fused-optimizer,low-bit-optimizer", 2, "low-bit-optimizer and fused-optimizer cannot be"),
        ("--technique C,activation-swapping", 2, "cannot be combined: checkpointed blocks save nothing"),
        ("--technique cuda-graphs", 7, "cuda-graphs needs a CUDA device; the run is on cpu"),
        ("--technique ddp", 7, "ddp needs torchrun: torchrun --nproc-per-node 2 -m tensorkeep train"),
        ("--techniques.gradient-accumulation.batches 0", 2, "gradient-accumulation: batches is '0'"),
        ("--techniques.gradient-accumulation.batches two", 2, "gradient-accumulation: batches is 'two'"),
        ("--techniques.gradient-accumulation.parts 2", 2, "has no setting 'parts'\nits settings: batches"),
        ("--techniques.compile.mode fast", 2, "compile: mode is 'fast'\ngive one of default"),
        ("--techniques.compile yes", 2, 'techniques.compile is \'yes\'\ngive "on", "off", or a setting'),
    ],
    "tune training {} --data text.txt": [
        ("--memory 1GB", 2, "neither a recipe nor a run is given"),
        ("shakespeare-char-cpu --memory much", 2, "is not a size"),
        ("shakespeare --memory 1GB", 2, "there is no recipe"),
        ("shakespeare-char-cpu --memory 1GB --technique compil", 7, "there is no technique"),
        ("shakespeare-char-cpu --memory 1GB --technique ''", 2, "--technique '' names no technique"),
    ],
    "bench checkpoint --out out {}": [
        ("--experiment sixway", 2, "six-way"),
        ("--model openllama-4b", 2, "is not a known model"),
        ("--model openllama-3b:scale=16", 3, "the measurement needs"),
        ("--model openllama-3b:scale=0.0005:layers=1 --from x", 2, "exclude each other"),
        ("--from absent", 5, "does not exist"),
        ("--arms nothing", 2, "no arm 'nothing'"),
        ("--runs 0", 2, "--runs"),
        ("--with-optimizer sgd", 2, "with_optimizer: invalid enum value 'sgd'"),
        ("--time-limit -1", 2, "--time-limit"),
        ("--resume", 5, "the results file does not exist"),
    ],
    "bench {} --out out": [
        ("training --experiment peers", 2, "the experiment 'peers' measures the workload 'checkpoint'"),
        ("checkpoint --experiment techniques", 2, "tensorkeep bench training --experiment techniques"),
        ("training --experiment techniqes", 2, "did you mean 'techniques'?"),
        ("training --recipe gpt2", 2, "there is no recipe 'gpt2'"),
        ("training --steps 5", 2, "steps: 5 is less than 8"),
        ("training --arms 'flash attention'", 2, "did you mean 'only attention-flash'?"),
        ("training --arms 8bit", 2, "did you mean 'only low-bit-8'?"),
        ("checkpoint --experiment 6-way", 2, "did you mean 'six-way'?"),
        ("checkpoint --experiment Phase4", 2, "did you mean 'isolated'?"),
        ("training --arms 'only compil'", 2, "did you mean 'only compile'?"),
        ("training --data nowhere", 5, "nowhere"),
    ],
    "demo {}": [
        ("--scale 0", 2, "out of range"),
        ("--scale 1 --from x", 2, "exclude each other"),
        ("--size 1GB --scale 1", 2, "exclude each other"),
        ("--size 0", 2, "--size is 0 B, out of range"),
        ("--out page.txt", 2, "ends in .html"),
        ("--rounds 0", 2, "rounds"),
        ("--from nothing-here", 5, "nothing-here: does not exist"),
        ("--dir no/such/folder", 3, "--dir"),
        ("--scale 16", 3, "the measurement needs"),
    ],
    "generate . {}": [("", 5, "holds no run")],
    "{}": [
        ("--bogus info x", 2, "error: unknown option: --bogus"),
        ("-q", 2, "error: no command is given"),
        ("-C x", 2, "error: no command is given"),
        ("inof x", 2, "error: unknown command 'inof'; did you mean 'info'?"),
        (
            "pipeline --stage train --use_torch_compile",
            2,
            "'pipeline'; the command for it: tensorkeep train shakespeare-char-cpu --data my-text.txt --out run",
        ),
        ("pipeline.py --stage process", 2, "the command for it: tensorkeep data prepare my-text.txt --out data"),
        ("src/train_optimized.py", 2, "the command for it: tensorkeep train "),
        ("bench my.json", 2, "the command for it: tensorkeep bench checkpoint --experiment my.json"),
        ("bench suite 'a b.json'", 2, "the command for it: tensorkeep bench checkpoint --experiment 'a b.json'"),
        ("bench suite", 2, "the command for it: tensorkeep bench checkpoint --experiment six-way"),
        ("train configs/small.yaml", 2, "there is no recipe 'configs/small.yaml'"),
        ("info x --lagest 3", 2, "error: unknown option: --lagest. Did you mean --largest?"),
        ("verify x --threads 0", 2, 'error: invalid value "0" for --threads. Must be >= 1'),
        ("verify x --memory-budget 4X", 2, "error: invalid value for --memory-budget: '4X' is not a size"),
        ("diff x y --atol -1", 2, 'error: invalid value "-1.0" for --atol. Must be >= 0'),
        ("info absent", 5, "error: absent: does not exist"),
        ("info 'a\nb\x1b[2J'", 5, "error: a\\nb\\x1b[2J: does not exist"),
    ],
}


@pytest.mark.parametrize(
    ("command", "words", "code", "message"),
    [(command, *row) for command, rows in REFUSED.items() for row in rows],
)
def test_wrong_arguments_are_refused_with_a_remedy_and_nothing_is_written(
    command: str, words: str, code: int, message: str, tmp_path: Path, check_refused: Callable[..., list[str]]
) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 60)
    lines = check_refused(shlex.split(command.replace("{}", words)), code, message)
    assert lines[0].startswith("error: ")
    # A context that is longer than the data is known once the data is prepared, in the run's folder.
    assert names_in(tmp_path) == (["run", "text.txt"] if "a context of" in message else ["text.txt"])


def test_a_file_in_another_language_is_refused_with_the_command_for_it(
    tmp_path: Path, check_refused: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in (("small.yaml", "training:\n  batch_size: 8\n"), ("small.json", '{"batch_size": 8}')):
        (tmp_path / name).write_text(content)
        refused = f"{name}: is {name[6:].upper()}; settings are read from TOML"
        for command in ("train shakespeare-char-cpu", "info x"):
            with case(f"{command} {name}"):
                lines = check_refused([*command.split(), "-C", str(tmp_path / name)], 2, refused)
                assert "tensorkeep train RECIPE --loop.batch_size 8" in lines[1]
    file = str(tmp_path / "small.yaml")
    lines = check_refused(["train", file], 2, f"there is no recipe {file!r}")
    assert f"tensorkeep train RECIPE -C {file}; recipes: " in lines[1]
    # The command converts an experiment.
    (tmp_path / "small.yaml").write_text("arms:\n- {name: one, settings: {tool: torch}}\n")
    command = ["bench", "checkpoint", "--experiment", file]
    lines = check_refused(command, 2, "small.yaml: is YAML; experiments are read from JSON")
    *start, code, _, source, _, target = shlex.split(lines[1].partition(": ")[2])
    assert start == ["python", "-c"]
    pytest.importorskip("yaml")
    with open(source) as given, open(target, "w") as taken, monkeypatch.context() as patches:
        patches.setattr("sys.stdin", given)
        patches.setattr("sys.stdout", taken)
        exec(code, {})
    assert [arm.name for arm in read_experiment(tmp_path / "small.json").arms] == ["one", "one (again)"]
