"""The examples of ``--help`` and of the manual page, by command; a test parses each of them."""

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "tensorkeep info model.safetensors",
        "tensorkeep verify runs/step-*",
        "tensorkeep convert old.pt new --to native --compression lossless",
        "tensorkeep demo",
    ),
    "info": (
        "tensorkeep info model.safetensors",
        "tensorkeep info run",
        "tensorkeep info run@1200 --largest 20 --json",
    ),
    "ls": (
        "tensorkeep ls model.safetensors",
        "tensorkeep ls run@best 'model.layers.0.*' --long",
    ),
    "log": (
        "tensorkeep log run",
        "tensorkeep log run --last 50 --metric validation_loss",
        "tensorkeep log run --verify",
    ),
    "show": (
        "tensorkeep show model.safetensors --open",
        "tensorkeep show run --out run.html",
        "tensorkeep show run@1000 run@2000",
        "tensorkeep show s3://bucket/run@best --sample 200MB",
    ),
    "verify": (
        "tensorkeep verify model.safetensors",
        "tensorkeep verify run",
        "tensorkeep verify run/checkpoints/step-* --json",
    ),
    "diff": (
        "tensorkeep diff old.pt new",
        "tensorkeep diff run@1000 run@2000 --select 'model.*'",
        "tensorkeep diff a.safetensors b.safetensors --rtol 1e-3",
    ),
    "convert": (
        "tensorkeep convert old.pt new --to native",
        "tensorkeep convert old.pt small --to native --compression lossless",
        "tensorkeep convert run@best x.safetensors --to safetensors --select 'model.*'",
    ),
    "prune": (
        "tensorkeep prune run --keep-last 3 --dry-run",
        "tensorkeep prune run --keep-last 3 --keep-best 1 --metric loss",
        "tensorkeep prune run --keep-every 1000 --yes",
    ),
    "env": (
        "tensorkeep env",
        "tensorkeep env --path /data --json",
    ),
    "bench": (
        "tensorkeep bench checkpoint --list",
        "tensorkeep bench checkpoint --from model.safetensors",
    ),
    "bench checkpoint": (
        "tensorkeep bench checkpoint --list",
        "tensorkeep bench checkpoint --from model.safetensors --dir /data",
        "tensorkeep bench checkpoint --experiment six-way --runs 5 --out results",
    ),
    "bench claims": (
        "tensorkeep bench claims",
        "tensorkeep bench claims --dir /data --runs 3",
    ),
    "bench training": (
        "tensorkeep bench training --recipe shakespeare-char-cpu --steps 50",
        "tensorkeep bench training --list",
    ),
    "data": (
        "tensorkeep data prepare my-text.txt --out data",
        "tensorkeep data info data",
    ),
    "data prepare": (
        "tensorkeep data prepare my-text.txt --out data",
        "tensorkeep data prepare 'books/*.txt' --out data --tokenizer bpe",
        "tensorkeep data prepare stdlib --out data",
    ),
    "data info": (
        "tensorkeep data info data",
        "tensorkeep data info data --verify --json",
    ),
    "train": (
        "tensorkeep train shakespeare-char-cpu --data my-text.txt --out run",
        "tensorkeep train shakespeare-char-cpu --data my-text.txt --optim.lr 3e-4",
        "tensorkeep train --out run --resume --loop.steps 4000",
        "tensorkeep train --branch run@2000 --out longer --loop.steps 4000",
    ),
    "generate": (
        "tensorkeep generate run --prompt 'Once upon'",
        "tensorkeep generate run --which best --tokens 500 --temperature 0.7",
    ),
    "chat": (
        "tensorkeep chat run",
        "tensorkeep chat run --system 'Be brief.' --temperature 0.7 --min-p 0.05",
    ),
    "eval": (
        "tensorkeep eval run",
        "tensorkeep eval run@best --data book.txt --json",
        "tensorkeep eval run --multiple-choice hellaswag_val.jsonl",
    ),
    "export": (
        "tensorkeep export run --out for-transformers",
        "tensorkeep export run --which best --out hf --dtype bfloat16",
    ),
    "report": (
        "tensorkeep report results.json",
        "tensorkeep report results --out report.html --csv tables",
    ),
    "tune": (
        "tensorkeep tune checkpoint /data",
        "tensorkeep tune training --memory 4GB --run run",
    ),
    "tune checkpoint": (
        "tensorkeep tune checkpoint /data",
        "tensorkeep tune checkpoint /data --from model.safetensors --dry-run",
    ),
    "tune training": (
        "tensorkeep tune training shakespeare-char-cpu --memory 4GB",
        "tensorkeep tune training --run run --memory 4GB --predict-only",
    ),
    "demo": (
        "tensorkeep demo",
        "tensorkeep demo --from model.safetensors --rounds 5",
        "tensorkeep demo --training",
    ),
    "completion": (
        "source <(tensorkeep completion bash)",
        "tensorkeep completion zsh > ~/.zfunc/_tensorkeep",
        "tensorkeep completion fish > ~/.config/fish/completions/tensorkeep.fish",
    ),
    "man": (
        "tensorkeep man > ~/.local/share/man/man1/tensorkeep.1",
        "tensorkeep man | man -l -",
    ),
}


def epilogue(command: str) -> str:
    """Return the examples of a command as the end of its help."""
    return "\n".join(["Examples:", *(f"  {line}" for line in EXAMPLES[command])])
