"""Results files for tests of the report, with made-up figures; ``docs/reference/results.md`` describes the schema."""

import itertools
import json
import math
import random
from collections.abc import Callable
from functools import reduce
from operator import getitem, setitem
from pathlib import Path
from typing import Any

from documents import GIB, broken, summarise, truth
from documents import document as made_from
from tensorkeep_bench.results import Results, read_results

AMOUNT = 2_930_828_800
MEASURES = [
    {"name": name, "label": label, "unit": unit, "better": "lower", "primary": bool(about), "about": about}
    for name, label, unit, about in (
        ("save", "durable save", "s", "Until synced."),
        ("returned", "call returned", "s", ""),
        ("load_cold", "cold load", "s", "Not cached."),
        ("load_warm", "warm load", "s", "Cached."),
        ("stored", "size", "B", "Bytes of all files."),
        ("peak_memory", "memory", "B", ""),
    )
]

ENVIRONMENT = {
    "versions": {"python": "3.11.7", "torch": "2.13.0", "zipnn": None},
    "processor": {"model": "A processor", "cores": 8, "usable_cores": 2},
    "memory": {"total_bytes": 24 * 2**30, "available_bytes": 20 * 2**30, "limit_bytes": None},
    "devices": [],
    "storage": {"path": "/data", "file_system": "ext4", "direct_io": True, "free_bytes": 10**12},
}

# name: seconds to save, to load cold, share of the raw bytes
THREE_WAY = {"pytorch": (6.7, 3.3, 1.0), "tensorstore": (134.0, 19.0, 1.43), "t5x": (62.0, 26.0, 1.32)}
ISOLATED = {
    "baseline": (134.2, 12.3, 2.0),
    "concurrency_128": (98.4, 11.2, 2.0),
    "chunks_1mb": (67.9, 15.7, 2.0),
    "compression_gzip": (145.7, 18.9, 1.32),
    "concurrency_chunks": (56.8, 17.2, 2.0),
    "t5x_full": (58.9, 19.4, 1.32),
}
PEERS = {
    "pytorch": (3.1, 2.0, 1.0),
    "torch-no-crc": (2.9, 1.9, 1.0),
    "safetensors": (1.62, 1.4, 1.0),
    "dcp-1": (3.0, 2.2, 1.0),
    "dcp-2": (2.6, 2.1, 1.0),
    "tensorstore-raw": (1.9, 1.7, 1.0),
    "tensorstore-best": (1.75, 1.9, 0.92),
    "orbax": (2.4, 2.6, 0.93),
    "zipnn": (3.9, 2.2, 0.67),
    "tensorkeep": (0.82, 0.9, 1.0),
    "tensorkeep-lossless": (0.70, 0.8, 0.663),
    "tensorkeep-auto": (0.71, 0.82, 0.663),
}


def document(
    arms: dict[str, tuple[float, float, float]] = ISOLATED,
    *,
    name: str = "made-up",
    runs: int = 5,
    noise: float = 0.04,
    control: bool = True,
    missing: dict[str, tuple[str, str]] | None = None,
    slow: tuple[str, ...] = (),
    **options: Any,
) -> dict[str, Any]:
    """Return a results document; ``missing`` maps arms to the (status, reason) of all their cells."""
    names = [*arms, f"{next(iter(arms))} (again)"]
    per_gib = GIB / AMOUNT
    truths = {
        arm: truth(save * per_gib, cold=load * per_gib, warm=load * 0.6 * per_gib, stored=share)
        | {"returned": save * 0.9 * per_gib, "peak_memory": 100 * 2**20 * per_gib}
        for arm, (save, load, share) in arms.items()
    }
    result = made_from(
        truths,
        name=name,
        title=f"The {name} comparison",
        about="Made up, for tests of the report.",
        runs=runs,
        noise=noise,
        drift=noise / 2,
        control=names[-1] if control else None,
        amounts=dict.fromkeys(names, AMOUNT) | dict.fromkeys(slow, AMOUNT // 10),
        settings={arm: {"tool": "tensorstore", "chunk": 262144, "note": arm} for arm in names},
        replaced=[broken(arm, block, *why) for arm, why in (missing or {}).items() for block in range(runs)],
        **options,
    )
    subject = "OpenLLaMA-3B, first 100 parameters, float16"
    result |= {"subject": {"description": subject, "tensors": 100, "bytes": AMOUNT, "dtypes": {"float16": AMOUNT}}}
    result |= {"measures": [dict(measure) for measure in MEASURES], "environment": ENVIRONMENT, "tensorkeep": "0.3.0"}
    result |= {"started": "2026-01-02T03:04:05Z", "finished": "2026-01-02T03:54:05Z"}
    result["command"] = f"tensorkeep bench run {name} --runs {runs}"
    for cell in result["cells"]:
        command = ["tensorkeep", "bench", "cell", "--arm", cell["arm"], "--block", str(cell["block"])]
        cell |= {"command": command, "seconds": 60.0, "subject": subject, "clocks": {"import": 1.5, "gate": 0.4}}
    result["summary"] = summarise(result)
    return result


def many(count: int, **options: Any) -> dict[str, Any]:
    """Return a document of so many arms with long names, values two decades apart, and close neighbours."""
    random_ = random.Random(count)
    arms = {"pytorch": (3.0, 2.0, 1.0)}
    for index in range(1, count):
        save = 3.0 * 10 ** random_.uniform(-0.7, 1.2)
        size = random_.choice([1.0, 1.0, 1.0, 0.93, 0.663, 1.32, 2.0])
        load = 2.0 * 10 ** random_.uniform(-0.4, 0.6)
        arms[f"tensorstore zarr3 shards={index} zstd:{index % 5}"] = (save, load, size)
    return document(arms, name=f"many-{count}", **options)


def steps() -> dict[str, Any]:
    """Return a document of the design ``steps``: from a baseline to everything, one change at a time."""
    changes = {"keep-dtype": 0.52, "raw": 0.25, "all-in-flight": 0.6, "zarr3": 0.97}
    changes |= {"tensorkeep-format": 0.5, "direct-io": 0.62, "lossless": 0.9}
    arms, save = {"t5x-documented": (61.0, 26.0, 1.32)}, 61.0
    for index, (change, factor) in enumerate(changes.items()):
        save *= factor
        arms[f"to {change}"] = (save, 26.0 * save / 61, 1.32 if index == 0 else 1.0 if change != "lossless" else 0.66)
    result = document(arms, name="from-baseline-to-tensorkeep", design="steps")
    found = []
    for measure in ("save", "load_cold"):
        before = 1.0
        for index, change in enumerate(changes):
            arm = f"to {change}"
            base = result["summary"]["arms"][arm][measure]["gain"]
            step = base / before
            whole = math.log(result["summary"]["arms"]["to lossless"][measure]["gain"])
            one = {"change": change, "arm": arm, "measure": measure, "fraction": math.log(step) / whole}
            one |= {"gain_from_previous": step, "gain_from_base": base}
            one |= {"gain_from_previous_low": step * 0.95, "gain_from_previous_high": step * 1.05}
            one |= {"alone": step * 0.9 if index < 4 else None, "without": step * 1.1 if index != 4 else None}
            found.append({**one, "notes": [] if index < 4 else ["needs the format, so it cannot be added alone"]})
            before = base
    result["summary"]["steps"] = found
    return result


def factorial() -> dict[str, Any]:
    """Return a document of a 2 x 2 x 2 design with effects, and aliases as a fractional one would list them."""
    factors = {"chunk": ["64", "1 MiB"], "concurrency": ["1", "128"], "compressor": ["none", "gzip"]}
    arms = {}
    for chunk, concurrency, gzip in itertools.product((0, 1), repeat=3):
        save = 40.0 * 0.3**chunk * 0.7 ** (concurrency * (1 + chunk)) * 1.3**gzip
        label = f"chunk={factors['chunk'][chunk]} concurrency={factors['concurrency'][concurrency]} gzip={gzip}"
        arms[label] = (save, save / 5, 2.0 - 0.68 * gzip)
    result = document(arms, name="factorial", design="factorial")
    result["experiment"]["factors"] = factors
    result["experiment"]["aliases"] = [[["chunk"], ["concurrency", "compressor"]]]
    gains = {("chunk",): 4.1, ("concurrency",): 1.7, ("compressor",): 0.77}
    gains |= {("chunk", "concurrency"): 1.42, ("chunk", "compressor"): 1.01}
    effects: list[dict[str, Any]] = [
        {"factors": [*factors], "measure": "save", "gain": gain, "low": gain * 0.9, "high": gain * 1.1}
        for factors, gain in gains.items()
    ]
    unknown = dict.fromkeys(("gain", "low", "high"))
    result["summary"]["effects"] = [*effects, {"factors": ["concurrency", "compressor"], "measure": "save", **unknown}]
    interaction = {"changes": ["chunk", "concurrency"], "arm": "both", "measure": "save"}
    figures = {"gain": 6.7, "product": 4.9, "ratio": 1.37, "low": 1.2, "high": 1.5}
    result["summary"]["interactions"] = [{**interaction, **figures}]
    return result


def with_claims() -> dict[str, Any]:
    """Return a three-way document whose summary checks claims."""
    result = document(THREE_WAY, name="claims")
    names = ("id", "claim", "theirs", "ours", "verdict", "reason", "gain", "gain_low", "gain_high")
    saving = ("2", "T5X saves 54% faster than basic TensorStore", "-54%", "-49%", "reproduced", "", 1.98, 1.7, 2.3)
    reason = "the arm without a compressor was compressed with Blosc"
    gzip = ("5", "gzip alone costs 1.8%", "+1.8%", "+41%", "confounded", reason, None, None, None)
    result["summary"]["claims"] = [dict(zip(names, claim, strict=True)) for claim in (saving, gzip)]
    return result


def placed(*keys: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return a function that gives a document a value, at the place to which the keys lead."""
    return lambda document: setitem(reduce(getitem, keys[:-1], document), keys[-1], value)


def write(result: dict[str, Any], folder: Path) -> Path:
    """Write a document as ``results.json`` and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(result))
    return folder


def read(result: dict[str, Any], folder: Path) -> Results:
    """Write a document and read it."""
    return read_results(write(result, folder))
