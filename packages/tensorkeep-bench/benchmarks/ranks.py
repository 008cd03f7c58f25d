"""Saves and loads by several ranks on this machine: ours beside DCP's, and beside one process: ``make bench-ranks``.

Every rank is a process with its shards of one model; a rank's time is from a barrier to its own return, and a save's is
that of the slowest. All are durable: DCP syncs its files, and here the directories are synced as well. The arms take
turns. The ranks share one disk, which one process drives alone nearly as fast, so that nothing here is a scaling.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from figures import Line, Worker, median_line, note, parser_of, show, write_samples
from ranks_planning import Planning, plan_by_dcp, plan_by_tensorkeep
from tensorkeep.cli.text import Table
from tensorkeep.storage.buffers import DEFAULT_BUDGET
from tensorkeep.units import format_bytes
from tensorkeep_bench.checkpoint.files import check_capacity, files_of, remove
from tensorkeep_bench.checkpoint.models import parse, spec_of_size

SAVES = ("tensorkeep", "tensorkeep lossless", "DcpWriter", "dcp 1", "dcp 2", "dcp 4")
LOADS = ("tensorkeep", "DcpReader", "dcp")
STALLS = ("tensorkeep", "dcp", "copy")
OURS = ("tensorkeep", "DcpWriter", "DcpReader")
RESHARDED = ((2, 3), (4, 2))
"""Ranks that save, and ranks that load."""

INTERPRETER_ALLOWANCE = 32 * 1024**2

Sample = dict[str, Any]


def main() -> int:
    options = _options()
    spec = spec_of_size(options.size)
    nbytes = parse(spec).nbytes
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="tensorkeep-bench-", dir=options.dir) as folder:
        check_capacity(Path(folder), disk=3 * nbytes, memory=5 * nbytes)
        for part in (part for part in PARTS if part in options.only):
            samples += PARTS[part](Path(folder), spec, options)
    planning = _planning(options) if "planning" in options.only else []
    lines = [*_lines(samples, options), *_planning_lines(planning)]
    _print(spec, nbytes, samples)
    write_samples(
        options.out,
        f"ranks.py --size {options.size} --rounds {options.rounds}",
        folder=options.dir,
        lines=lines,
        state={"spec": spec, "bytes": nbytes},
        samples=samples,
        planning=[asdict(each) for each in planning],
    )
    return show(lines)


def _options() -> argparse.Namespace:
    parts = [*PARTS, "planning"]
    parser = parser_of(__doc__, rounds=5, folder="a folder on the disk to measure", size="2GB")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts, help="measure these parts only")
    parser.add_argument("--arms", nargs="+", help="leave out all other ways to save and load")
    return parser.parse_args()


class World:
    """Ranks, each a process with its shards in memory."""

    def __init__(self, size: int, spec: str, folder: Path) -> None:
        self.size = size
        store = tempfile.mktemp(prefix=f"store-{size}-", dir=folder)
        command = [sys.executable, str(Path(__file__).with_name("ranks_worker.py")), "--size", str(size)]
        command += ["--spec", spec, "--store", store]
        self._ranks = [Worker(*command, "--rank", str(rank)) for rank in range(size)]
        self._answers()

    def ask(self, what: str, arm: str, path: Path) -> Sample:
        """Let all ranks do something; return what each of them measured."""
        note(f"{self.size} ranks: {what}, {arm}")
        for rank in self._ranks:
            rank.send({"what": what, "arm": arm, "path": str(path)})
        found = self._answers()
        figures = {key: [answer[key] for answer in found] for key in found[0]}
        return {"what": what, "arm": arm, "ranks": self.size, **figures}

    def _answers(self) -> list[dict[str, float]]:
        return [rank.answer() for rank in self._ranks]

    def close(self) -> None:
        for rank in self._ranks:
            rank.process.stdin.close()
        for rank in self._ranks:
            rank.process.wait()


@contextmanager
def worlds(sizes: tuple[int, ...], spec: str, folder: Path) -> Iterator[dict[int, World]]:
    with ExitStack() as stack:
        found: dict[int, World] = {}
        for size in sizes:
            note(f"building {spec} on {size} ranks")
            found[size] = World(size, spec, folder)
            stack.callback(found[size].close)
        yield found


def _chosen(arms: tuple[str, ...], options: argparse.Namespace) -> list[str]:
    return [arm for arm in arms if options.arms is None or arm in options.arms]


def _turned(arms: list[Any], number: int) -> list[Any]:
    """Return the arms in the order of a round: each round begins with the next one."""
    start = number % len(arms) if arms else 0
    return arms[start:] + arms[:start]


def _saves(folder: Path, spec: str, options: argparse.Namespace) -> Iterator[Sample]:
    """Save with 2 and 4 ranks, and with one process; the first round is not counted."""
    arms = [(size, arm) for size in (2, 4) for arm in _chosen(SAVES, options)]
    arms += [(1, arm) for arm in _chosen(("tensorkeep",), options)]
    with worlds((1, 2, 4), spec, folder) as found:
        for number in range(options.rounds + 1):
            for size, arm in _turned(arms, number):
                path = folder / "saved"
                os.sync()
                sample = found[size].ask("save", arm, path)
                sample["stored"] = sum(file.stat().st_size for file in files_of(path))
                remove(path)
                if number:
                    yield {"round": number, **sample}


def _loads(folder: Path, spec: str, options: argparse.Namespace) -> Iterator[Sample]:
    """Load on another number of ranks, from files that are not in the page cache, and from files that are."""
    for savers, loaders in RESHARDED:
        arms = _chosen(LOADS, options)
        paths = {"tensorkeep": folder / "ours", "DcpReader": folder / "ours", "dcp": folder / "dcp"}
        with worlds((savers,), spec, folder) as found:
            for arm in {"tensorkeep" if arm in OURS else "dcp 1" for arm in arms}:
                found[savers].ask("save", arm, paths[arm.split()[0]])
        with worlds((loaders,), spec, folder) as found:
            for number in range(options.rounds + 1):
                for arm in _turned(arms, number):
                    for what in ("cold load", "warm load"):
                        sample = found[loaders].ask(what, arm, paths[arm])
                        if number:
                            yield {"round": number, "saved_by": savers, **sample}
                    if not number and not all(found[loaders].ask("check", arm, paths[arm])["equal"]):
                        raise SystemExit(f"{arm} did not load what was saved")
        for path in set(paths.values()):
            remove(path)


def _stalls(folder: Path, spec: str, options: argparse.Namespace) -> Iterator[Sample]:
    with worlds((2,), spec, folder) as found:
        for number in range(options.rounds + 1):
            for arm in _turned(_chosen(STALLS, options), number):
                sample = found[2].ask("stall", arm, folder / "saved")
                if number:
                    yield {"round": number, **sample}
        remove(folder / "saved")


def _replicas(folder: Path, spec: str, options: argparse.Namespace) -> Iterator[Sample]:
    """Save shards of which two ranks have each, as HSDP on a 2 x 2 mesh, of an eighth of the model."""
    spec = spec_of_size(options.size // 8)
    with worlds((4,), spec, folder) as found:
        for arm in _chosen(("tensorkeep", "dcp 1"), options):
            yield {"round": 1, "bytes": parse(spec).nbytes, **found[4].ask("replicas", arm, folder / "saved")}
        remove(folder / "saved")


PARTS = {"saves": _saves, "loads": _loads, "stalls": _stalls, "replicas": _replicas}


def _planning(options: argparse.Namespace) -> list[Planning]:
    found: list[Planning] = []
    for _ in range(min(3, options.rounds)):
        note("planning of 256 ranks and 1,000 tensors, synthetic")
        found += [plan_by_tensorkeep(256, 1000), plan_by_dcp(256, 1000)]
    note("planning of 1,024 ranks and 2,000 tensors, synthetic")
    return [*found, plan_by_tensorkeep(1024, 2000)]


# Figures


def _lines(samples: list[Sample], options: argparse.Namespace) -> Iterator[Line]:
    seconds = _seconds(samples)

    def faster(what: str, bound: float | None, key: Any, theirs: Any) -> Iterator[Line]:
        rounds = sorted(seconds.get(key, {}).keys() & seconds.get(theirs, {}).keys())
        if rounds:
            yield median_line(what, bound, [seconds[theirs][number] / seconds[key][number] for number in rounds])

    for size in (2, 4):
        best = min(
            (arm for arm in SAVES if arm.startswith("dcp") and ("save", arm, size, None) in seconds),
            key=lambda arm: statistics.median(seconds["save", arm, size, None].values()),
            default="dcp 1",
        )
        theirs = ("save", best, size, None)
        for arm, bound in (("tensorkeep", 1.4), ("DcpWriter", None), ("tensorkeep lossless", 1.0)):
            yield from faster(f"save, {size} ranks, {arm}, against {best}", bound, ("save", arm, size, None), theirs)
        alone = ("save", "tensorkeep", 1, None)
        yield from faster(f"save, {size} ranks, against one process", 0.85, ("save", "tensorkeep", size, None), alone)
    for savers, loaders in RESHARDED:
        for what in ("cold load", "warm load"):
            for arm, bound in (("tensorkeep", 1.2), ("DcpReader", None)):
                key, theirs = (what, arm, loaders, savers), (what, "dcp", loaders, savers)
                yield from faster(f"{what}, {savers} to {loaders} ranks, {arm}, against dcp", bound, key, theirs)
    stall, copy = ("stall", "tensorkeep", 2, None), ("stall", "copy", 2, None)
    rounds = sorted(seconds.get(stall, {}).keys() & seconds.get(copy, {}).keys())
    if rounds:
        found = [seconds[stall][number] / seconds[copy][number] for number in rounds]
        yield median_line("stall of save_async, over a copy of the shards", 1.3, found, at_most=True)
    yield from _byte_lines(samples)


def _byte_lines(samples: list[Sample]) -> Iterator[Line]:
    for savers, loaders in RESHARDED:
        for arm in LOADS:
            found = [
                sum(each["read"]) / sum(each["own"])
                for each in samples
                if (each["what"], each["arm"], each["ranks"]) == ("cold load", arm, loaders)
                and each["saved_by"] == savers
            ]
            bound = 1.1 if arm in OURS else None
            if found:
                what = f"bytes read over those wanted, {savers} to {loaders} ranks, {arm}"
                yield median_line(what, bound, found, at_most=True)
    stored = [sum_of_files(each) for each in samples if each["arm"] == "tensorkeep lossless" and "stored" in each]
    if stored:
        yield median_line("lossless: stored bytes over raw", 0.67, stored, at_most=True)
    for each in samples:
        if each["what"] == "replicas":
            ours = each["arm"] in OURS
            written = each["written"]
            what = f"HSDP on 2 x 2 ranks, {each['arm']}"
            yield median_line(f"{what}: bytes written over the state's", 1.01 if ours else None,
                        [sum(written) / each["bytes"]], at_most=True)  # fmt: skip
            yield median_line(f"{what}: most bytes of a rank over the mean", 1.05 if ours else None,
                        [max(written) * len(written) / sum(written)], at_most=True)  # fmt: skip
    most = (DEFAULT_BUDGET + INTERPRETER_ALLOWANCE) / 1e6
    for arm in OURS:
        used = [max(each["memory"]) / 1e6 for each in samples if each["arm"] == arm and each["what"] in MEMORY_OF]
        if used:
            yield Line(f"peak memory of a rank besides its shards, {arm}", most, max(used), min(used), max(used),
                       unit="MB", at_most=True)  # fmt: skip


MEMORY_OF = ("save", "cold load", "warm load")


def sum_of_files(sample: Sample) -> float:
    return float(sample["stored"]) / sum(sample["own"])


def _planning_lines(planning: list[Planning]) -> Iterator[Line]:
    by_size: dict[tuple[int, int], dict[str, list[Planning]]] = {}
    for each in planning:
        by_size.setdefault((each.ranks, each.tensors), {}).setdefault(each.tool, []).append(each)
    for (ranks, tensors), found in by_size.items():
        what = f"{ranks:,} ranks x {tensors:,} tensors (synthetic)"
        for tool, all_of_tool in found.items():
            yield median_line(f"planning of {what}, {tool}", None, [each.planning for each in all_of_tool], unit="s")
            yield median_line(f"finishing of {what}, {tool}", None, [each.finishing for each in all_of_tool], unit="s")
        if len(found) > 1:
            pairs = zip(found["tensorkeep"], found["dcp"], strict=True)
            ratios = [theirs.planning / ours.planning for ours, theirs in pairs]
            yield median_line(f"planning of {what}, against dcp", 20.0, ratios)


def _seconds(samples: list[Sample]) -> dict[Any, dict[int, float]]:
    """Return the seconds of the slowest rank by round, by what was done, how, and on how many ranks."""
    found: dict[Any, dict[int, float]] = {}
    for each in samples:
        key = each["what"], each["arm"], each["ranks"], each.get("saved_by")
        found.setdefault(key, {})[each["round"]] = max(each["seconds"])
    return found


def _print(spec: str, nbytes: int, samples: list[Sample]) -> None:
    print(f"\n{spec}, {format_bytes(nbytes)}\n")
    rows = [
        (what, arm, f"{saved_by} to {ranks}" if saved_by else str(ranks), f"{statistics.median(found.values()):.2f} s")
        for (what, arm, ranks, saved_by), found in _seconds(samples).items()
    ]
    Table(("", "arm", ">ranks", ">median"), rows).show()
    print()


if __name__ == "__main__":
    sys.exit(main())
