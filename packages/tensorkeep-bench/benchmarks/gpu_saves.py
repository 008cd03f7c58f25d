"""Checkpoints of tensors on a GPU beside other tools: ``python benchmarks/gpu_saves.py --out results.json``.

All figures are of one state of bfloat16 tensors on one device, in interleaved rounds in random order. Every raw sample
goes to the file with its environment; the table has ratios to Tensorkeep in the same round, above 1 if it is faster.

* *save*: until the data is durable; the other tools' files are synchronised after they are written.
* *load*: from the page cache to tensors on the device, new or existing ones; all are compared with the state.
* *blocked*: how long the call of an asynchronous save blocks the training loop, until the state may be changed.
* *step*: a training step on the device while a save is written, beside one without.
"""

import random
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import tensorkeep
from figures import for_seconds, median_step, parser_of, ratios, seconds_of, training_step, write_samples
from tensorkeep.cli.text import Table
from tensorkeep.units import format_seconds
from tensorkeep_bench.checkpoint.files import remove, sync_tree, warm
from tensorkeep_bench.checkpoint.models import build, spec_of_size

SEED = 20_261_126
OURS = "tensorkeep"

State = dict[str, torch.Tensor]
Samples = dict[str, dict[str, list[float]]]


def main() -> int:
    parser = parser_of(__doc__, rounds=5, folder="a folder on the disk to measure", size="2GB")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is .*", category=UserWarning)
    device, order = torch.device(options.device), random.Random(SEED)
    state = {name: tensor.to(device) for name, tensor in build(spec_of_size(options.size), seed=SEED).items()}
    nbytes = sum(each.nbytes for each in state.values())
    samples: Samples = defaultdict(lambda: defaultdict(list))
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="tensorkeep-bench-", dir=options.dir) as place:
        folder = Path(place)
        saves_and_loads(state, folder, options.rounds, order, samples)
        blocked(state, folder, options.rounds, order, samples, failed)
        steps(state, folder, options.rounds, samples)
    print(f"{nbytes:,} bytes on {device}; medians of {options.rounds} rounds")
    Table(("", "tool", ">median", ">ratio to tensorkeep", ">spread"), rows(samples)).show()
    for name, error in failed.items():
        print(f"not measured: {name}: {error}")
    command = f"gpu_saves.py --size {options.size} --rounds {options.rounds}"
    write_samples(options.out, command, folder=options.dir, bytes=nbytes, failed=failed, samples=samples)
    return 0


def rows(samples: Samples) -> list[tuple[str, ...]]:
    """Return the medians, and the ratios of each round to the first tool of a figure."""
    found = []
    for figure, tools in samples.items():
        first = next(iter(tools))
        for tool, seconds in tools.items():
            median, low, high = ratios(tools, tool, first)
            spread = f"{low:.2f} - {high:.2f}"
            found.append((figure, tool, format_seconds(statistics.median(seconds)), f"{median:.2f}", spread))
    return found


def seconds_on_device(call: Callable[[], object]) -> float:
    """Return the seconds of a call, with what it started on the device."""
    synchronize()
    return seconds_of(lambda: (call(), synchronize()))


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def saves_and_loads(state: State, folder: Path, rounds: int, order: random.Random, samples: Samples) -> None:
    """Measure durable saves, and loads to the device from a file that is in the page cache."""
    device = str(next(iter(state.values())).device)
    into = {name: torch.empty_like(each) for name, each in state.items()}
    ours, lossless, torch_file, flat, dcp_folder = (
        folder / name for name in ("ours", "lossless", "state.pt", "state.safetensors", "dcp")
    )

    def synced(save: Callable[[], object], path: Path) -> None:
        save()
        sync_tree(path)

    saves: dict[str, tuple[Path, Callable[[], object]]] = {
        OURS: (ours, partial(tensorkeep.save, state, ours, compression=None)),
        "tensorkeep, lossless": (lossless, partial(tensorkeep.save, state, lossless, compression="auto")),
        "torch.save": (torch_file, partial(synced, partial(torch.save, state, torch_file), torch_file)),
        "safetensors": (flat, partial(synced, partial(safetensors.torch.save_file, state, flat), flat)),
        "dcp": (
            dcp_folder,
            partial(
                synced,
                lambda: dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(dcp_folder), no_dist=True),
                dcp_folder,
            ),
        ),
    }
    new: dict[str, tuple[Path, Callable[[], State]]] = {
        OURS: (ours, partial(tensorkeep.load, ours, device=device)),
        "tensorkeep, lossless": (lossless, partial(tensorkeep.load, lossless, device=device)),
        "torch.load": (torch_file, partial(torch.load, torch_file, map_location=device)),
        "torch.load, mmap": (torch_file, partial(torch.load, torch_file, map_location=device, mmap=True)),
        "safetensors": (flat, partial(safetensors.torch.load_file, flat, device=device)),
    }
    existing: dict[str, tuple[Path, Callable[[], object]]] = {
        OURS: (ours, partial(tensorkeep.load, ours, into=into)),
        "tensorkeep, lossless": (lossless, partial(tensorkeep.load, lossless, into=into)),
        "dcp": (
            dcp_folder,
            lambda: dcp.load(into, storage_reader=dcp.FileSystemReader(dcp_folder), no_dist=True),  # type: ignore[arg-type]
        ),
    }
    for number in range(rounds + 1):
        # The first round only makes memory warm and loads kernels.
        kept: Samples = samples if number else defaultdict(lambda: defaultdict(list))
        for name in shuffled(saves, order):
            path, save = saves[name]
            remove(path)
            kept["save"][name].append(seconds_on_device(save))
        for name in shuffled(new, order):
            path, load = new[name]
            warm(path)
            found: list[State] = []
            kept["load, new tensors"][name].append(
                seconds_on_device(lambda load=load, found=found: found.append(load()))
            )
            check(found[0], state)
            del found
        for name in shuffled(existing, order):
            path, fill = existing[name]
            warm(path)
            for each in into.values():
                each.zero_()
            kept["load, existing tensors"][name].append(seconds_on_device(fill))
            check(into, state)
        sort_first(kept, OURS)


def blocked(
    state: State, folder: Path, rounds: int, order: random.Random, samples: Samples, failed: dict[str, str]
) -> None:
    """Measure how long asynchronous saves block, and a copy of the state to host memory, which is the least they do.

    A tool that raises an error is measured no further: DCP's pinned stager does with some versions of torch.
    """
    on_gpu = next(iter(state.values())).is_cuda
    host = {name: torch.empty_like(each, device="cpu", pin_memory=on_gpu) for name, each in state.items()}
    manager = tensorkeep.CheckpointManager(folder / "run", keep_last=1)
    place, count = folder / "async", iter(range(10**6))
    stagers: dict[str, DefaultStager | None] = {
        "dcp": None,
        "dcp, kept pinned memory": DefaultStager(StagingOptions(on_gpu, False, False, on_gpu)),
    }

    def ours() -> float:
        begin = time.perf_counter()
        pending = manager.save(next(count), state)
        held = time.perf_counter() - begin
        pending.wait()
        return held

    def theirs(stager: DefaultStager | None) -> float:
        begin = time.perf_counter()
        writer = dcp.FileSystemWriter(place)
        future = dcp.async_save(dict(state), storage_writer=writer, async_stager=stager, no_dist=True)
        staged = getattr(future, "staging_completion", None)
        if staged is not None:
            staged.result()
        held = time.perf_counter() - begin
        getattr(future, "upload_completion", future).result()
        remove(place)
        return held

    def copy() -> float:
        return seconds_on_device(lambda: [host[name].copy_(each, non_blocking=True) for name, each in state.items()])

    measured: dict[str, Callable[[], float]] = {
        OURS: ours,
        "copy to pinned memory": copy,
        "copy to new memory": lambda: seconds_on_device(lambda: [each.to("cpu", copy=True) for each in state.values()]),
        **{name: partial(theirs, stager) for name, stager in stagers.items()},
    }
    for number in range(rounds + 1):
        for name in shuffled(measured, order):
            synchronize()
            try:
                held = measured[name]()
            except (RuntimeError, KeyError, TypeError) as error:
                failed[name] = repr(error)
                del measured[name]
                continue
            if number:
                samples["blocked"][name].append(held)
    manager.close()
    for stager in stagers.values():
        if stager is not None:
            stager.close()
    sort_first(samples, OURS)


def steps(state: State, folder: Path, rounds: int, samples: Samples) -> None:
    """Measure steps of a model on the device alone, and beside a save of the state in the background."""
    device = next(iter(state.values())).device
    width = 4096 if device.type == "cuda" else 256
    with device:
        step = training_step(width, width, fused=True)
    manager = tensorkeep.CheckpointManager(folder / "steps", keep_last=1)

    for number in range(rounds + 1):
        alone = median_step(step, for_seconds(1.0), seconds_on_device)
        pending = manager.save(number, state)
        beside = median_step(step, lambda pending=pending: not pending.done(), seconds_on_device)
        pending.wait()
        if number:
            samples["step"]["alone"].append(alone)
            samples["step"]["beside a save"].append(beside)
    manager.close()


def shuffled(names: Any, order: random.Random) -> list[str]:
    """Return names in random order."""
    return order.sample([*names], len(names))


def sort_first(samples: Samples, name: str) -> None:
    """Put a tool first in each figure that has it."""
    for figure, tools in samples.items():
        if name in tools:
            samples[figure] = {name: tools[name], **tools}


def check(found: State, state: State) -> None:
    """Raise AssertionError if tensors differ from those of the state, or are on another device."""
    for name, each in state.items():
        assert found[name].device == each.device and torch.equal(found[name], each), name


if __name__ == "__main__":
    sys.exit(main())
