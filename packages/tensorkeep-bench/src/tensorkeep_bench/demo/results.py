"""The results of the demo, as JSON and as five sentences."""

from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from tensorkeep import VerifyReport
from tensorkeep.ext import format_bytes, format_seconds, number
from tensorkeep_bench.checkpoint.measure import FIRST, SAVE, STORED
from tensorkeep_bench.demo.faults import DamageReport, KilledSave, PeerDamage
from tensorkeep_bench.demo.speed import SmallRun, figures
from tensorkeep_bench.demo.training import ComparedRuns
from tensorkeep_bench.results import Results
from tensorkeep_bench.wording import listed


@dataclass(frozen=True, slots=True)
class DemoResults:
    source: str | None
    description: str
    tensors: int
    state_bytes: int
    rounds: Results
    t5x: SmallRun
    intact: VerifyReport
    damage: DamageReport
    peers: list[PeerDamage]
    kills: list[KilledSave]
    training: ComparedRuns
    six_way: Results

    @property
    def ok(self) -> bool:
        # Only the saves of Tensorkeep: a checkpoint that torch broke does not fail the demo.
        kept = all(kill.intact for kill in self.kills if kill.tool == "tensorkeep")
        return self.intact.ok and not self.damage.report.ok and kept and self.training.exact

    def document(self) -> dict[str, Any]:
        damage = self.damage
        return {
            "ok": self.ok,
            "source": self.source,
            "tensors": self.tensors,
            "state_bytes": self.state_bytes,
            "measures": msgspec.to_builtins(figures(self.rounds)),
            "rounds": {
                "seed": self.rounds.experiment.seed,
                "cells": msgspec.to_builtins(self.rounds.cells),
            },
            "t5x": asdict(self.t5x),
            "verify": self.intact.as_dict(),
            "damage": {
                "flip": asdict(damage.flip),
                "verify": damage.report.as_dict(),
                "refusal": damage.refusal,
                "peers": [{**asdict(each), "silent": each.silent} for each in self.peers],
            },
            "kills": [asdict(each) for each in self.kills],
            "training": {**asdict(self.training), "same": self.training.same, "exact": self.training.exact},
            "six_way": msgspec.to_builtins(self.six_way),
        }


def facts(results: DemoResults) -> list[str]:
    """Return what was measured, in five sentences."""
    table = figures(results.rounds)
    size = format_bytes(results.state_bytes)
    save, load, stored = (
        {arm: figure.median for arm, figure in table.get(measure, {}).items()} for measure in (SAVE, FIRST, STORED)
    )
    fraction = stored["tensorkeep-lossless"] / results.state_bytes
    flip, training = results.damage.flip, results.training
    silent = [
        f"{each.tool} loaded {number(each.after or 0.0)} for {number(each.before)}"
        for each in results.peers
        if each.silent
    ]
    # Another version of a tool may detect the damage.
    unnoticed = f"{listed(silent)}, without a word; " if silent else ""
    left = {kill.tool: "whole, bit for bit" if kill.intact else "broken" for kill in results.kills}
    return [
        f"A durable save of {size}: {_times(save)}; lossless, in {fraction:.0%} of the bytes.",
        f"The first load in a new process: {_times(load)}. Only tensorkeep verifies what it reads.",
        f"One flipped bit: {unnoticed}tensorkeep named tensor {flip.name}, block {flip.block}, and refused to load it.",
        f"kill -9 during a save: the checkpoint of tensorkeep was {left['tensorkeep']}, and the "
        f"checkpoint of torch.save was {left['torch']}.",
        f"kill -9 during training: {training.same} of {len(training.unbroken)} losses are the same, bit for bit, as "
        "without the kill.",
    ]


def _times(seconds: dict[str, float]) -> str:
    words = {
        "tensorkeep": "tensorkeep",
        "tensorkeep-lossless": "lossless",
        "torch": "torch",
        "safetensors": "safetensors",
    }
    return ", ".join(f"{word} {format_seconds(seconds[arm])}" for arm, word in words.items() if arm in seconds)
