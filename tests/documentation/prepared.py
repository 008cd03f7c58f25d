"""What the pages of the documentation take for granted: texts, a model of Hugging Face, checkpoints of other tools."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

import tensorkeep
from documentation.blocks import ROOT, blocks
from tensorkeep.cli.main import main

_SENTENCE = "It was the best of times, it was the worst of times, it was the age of wisdom. Once upon a time. "


def texts(*names: str) -> Callable[[], None]:
    """Return a function that writes texts; a name that ends with a slash is a folder of them."""

    def write() -> None:
        for name in names:
            place = Path(name)
            if name.endswith("/"):
                place.mkdir()
                for number in range(40):
                    (place / f"{number}.txt").write_text(f"{number} {_SENTENCE * 8}")
            else:
                place.write_text(_SENTENCE * 200)

    return write


def questions() -> None:
    question = {"ctx": "It was the best of", "endings": ["times", "age", "wisdom", "it"], "label": 0}
    Path("hellaswag_val.jsonl").write_text(f"{json.dumps(question)}\n" * 3)


def documents() -> None:
    """Write documents in every form that ``tensorkeep data prepare`` reads."""
    texts("books.txt", "books/")()
    lines = [f"{number} {_SENTENCE}" for number in range(100)]
    for number, line in enumerate(lines):
        Path("books", f"{number}.log").write_text(line)
    Path("comments.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    Path("dump.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    Path("web").mkdir()
    pq.write_table(pa.table({"content": lines}), "web/page.parquet")
    saved = Path("saved-dataset")
    saved.mkdir()
    table = pa.table({"text": lines})
    with pa.OSFile("saved-dataset/data.arrow", "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    (saved / "dataset_info.json").write_text("{}")
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))


def experiment(page: str, name: str) -> Callable[[], None]:
    """Return a function that writes the experiment that a page shows."""

    def write() -> None:
        block = next(block for block in blocks(ROOT / page) if block.language == "json")
        Path(name).write_text(block.text)

    return write


def hugging_face_model() -> None:
    """A GPT-2 of this package, in the form of Hugging Face, with a tokenizer of bytes."""
    texts("for-gpt2/")()  # documents: what ends one is a token of the model
    small = "--data.tokenizer bpe --data.vocab_size 300 --model.n_layers 1 --model.d_model 16 --model.n_heads 2"
    steps = "--loop.steps 2 --schedule.warmup_steps 0 --eval.every 0"
    assert main(f"train shakespeare-char-cpu --data for-gpt2 --out trained {small} {steps}".split()) == 0
    assert main(["export", "trained", "--out", "gpt2"]) == 0


def checkpoints(*names: str) -> Callable[[], None]:
    """Return a function that saves checkpoints in the formats of their names; ``run@10`` is step 10 of a run."""

    def save() -> None:
        state = {"model": {"layers.0.weight": torch.randn(64, 64), "head.weight": torch.randn(64, 8)}, "step": 1}
        for name in names:
            run, at, step = name.partition("@")
            if at:
                with tensorkeep.CheckpointManager(run) as manager:
                    metrics = {"loss": 1.0, "accuracy": 0.5}
                    manager.save(int(step), state, metrics=metrics)
            else:
                tensorkeep.save(state, name)

    return save


def run_in_a_store() -> None:
    """Save a step of a run into the store, and one to the disk."""
    checkpoints("run@100")()
    with tensorkeep.CheckpointManager("s3://bucket/run") as manager:
        manager.save(12, {"model": {"head.weight": torch.zeros(64, 8)}}, metrics={"val_loss": 1.0}).wait()


def training_loop(step: int) -> dict[str, Any]:
    """Return the names that a program has which trains, after a step."""
    model = torch.nn.ModuleDict({"head": torch.nn.Linear(8, 64, bias=False)})
    optimizer = torch.optim.AdamW(model.parameters())
    return {
        "torch": torch,
        "tensorkeep": tensorkeep,
        "model": model,
        "optimizer": optimizer,
        "state": {"model": model, "optimizer": optimizer},
        "step": step,
        "loss": 0.5,
    }


PREPARED: dict[str, tuple[Callable[[], None], ...]] = {
    "docs/explanation/lossless.md": (texts("my-text.txt"), checkpoints("model.safetensors")),
    "docs/how-to/bench-training.md": (texts("corpus.txt"),),
    "docs/how-to/bench.md": (checkpoints("runs/step-100"), experiment("docs/how-to/bench.md", "mine.json")),
    "docs/how-to/chat.md": (texts("books/"), hugging_face_model),
    "docs/how-to/cloud.md": (run_in_a_store,),
    "docs/how-to/compare.md": (checkpoints("run@10", "run@20", "base.safetensors", "old.pt", "new"),),
    "docs/how-to/convert.md": (checkpoints("run@10", "old.pt"),),
    "docs/how-to/from-a-comparison.md": (
        experiment("docs/how-to/from-a-comparison.md", "phase4_config.json"),
        texts("my-text.txt"),
    ),
    "docs/how-to/prepare-data.md": (documents,),
    "docs/how-to/show.md": (
        checkpoints("run@10", "run@20", "run@100", "run@200", "other@10", "model.safetensors", "llama-5b"),
    ),
    "docs/how-to/techniques.md": (texts("my-text.txt", "corpus"),),
    "docs/how-to/train.md": (texts("my-text.txt", "book.txt", "corpus"), questions, hugging_face_model),
    "packages/chatgot/README.md": (texts("my-text.txt"),),
    "packages/tensorkeep-bench/README.md": (checkpoints("runs/step-100"),),
}
"""By page: what its first block finds in the folder in which it runs."""
