"""Results files as plain values, made from known true gains; docs/reference/results.md describes the schema."""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from tensorkeep_bench.analysis import summary
from tensorkeep_bench.results import Arm, CellRecord, Experiment, Results

GIB = 2**30

MEASURES: list[dict[str, Any]] = [
    {"name": "save", "label": "durable save", "unit": "s", "better": "lower", "primary": True, "about": ""},
    {"name": "returned", "label": "returned", "unit": "s", "better": "lower", "primary": False, "about": ""},
    {"name": "load_cold", "label": "cold load", "unit": "s", "better": "lower", "primary": True, "about": ""},
    {"name": "load_warm", "label": "warm load", "unit": "s", "better": "lower", "primary": True, "about": ""},
    {"name": "stored", "label": "bytes on disk", "unit": "B", "better": "lower", "primary": True, "about": ""},
]

Truth = Mapping[str, float]
"""True figures of an arm, per GiB of raw bytes: seconds, or bytes per byte for ``stored``."""


def truth(save: float = 1.0, *, cold: float = 1.0, warm: float = 0.5, stored: float = 1.0, **more: float) -> Truth:
    """Return an arm's true figures: seconds per GiB, and the stored fraction of the bytes."""
    return {"save": save, "returned": save, "load_cold": cold, "load_warm": warm, "stored": stored, **more}


def cell(arm: str, block: int, figures: Mapping[str, float], **more: Any) -> dict[str, Any]:
    """Return a cell with figures."""
    return {"arm": arm, "block": block, "status": "ok", "amount": GIB, "figures": dict(figures), **more}


def broken(arm: str, block: int, status: str = "failed", reason: str | None = "it broke") -> dict[str, Any]:
    """Return a cell without figures."""
    return cell(arm, block, {}, status=status, reason=reason)


def document(
    arms: Mapping[str, Truth],
    *,
    runs: int = 5,
    noise: float = 0.02,
    drift: float = 0.0,
    seed: int = 0,
    baseline: str | None = None,
    control: str | None = "control",
    amounts: Mapping[str, float] | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    places: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    replaced: Sequence[Mapping[str, Any]] = (),
    **experiment: Any,
) -> dict[str, Any]:
    """Return a complete document whose cells scatter around the truth.

    Parameters
    ----------
    arms : mapping of str to Truth
        The first is the baseline unless ``baseline`` names another.
    noise : float
        Standard deviation of the logs of all times; bytes have none.
    drift : float
        Standard deviation of the logs of a factor that all times of a block share.
    control : str, optional
        The name of the A/A control; None without one.
    amounts : mapping of str to float, optional
        Raw bytes that an arm works on; 1 GiB unless given.
    replaced : sequence of cell
        Take the place of the cells of the same arm and block.
    """
    draw = random.Random(seed)
    first = next(iter(arms)) if baseline is None else baseline
    truths = {**arms, control: arms[first]} if control else dict(arms)
    cells = []
    for block in range(runs):
        slow = math.exp(draw.gauss(0, drift))
        for arm in draw.sample(list(truths), len(truths)):
            amount = (amounts or {}).get(arm, GIB)
            figures = {
                name: value * amount
                if name == "stored"
                else value * amount / GIB * slow * math.exp(draw.gauss(0, noise))
                for name, value in truths[arm].items()
            }
            cells.append(cell(arm, block, figures, amount=amount, order=len(cells)))
    instead = {(entry["arm"], entry["block"]): dict(entry) for entry in replaced}
    roles = {first: "baseline", control: "control"}
    return {
        "schema": 1,
        "kind": "tensorkeep-results",
        "complete": True,
        "experiment": {
            "name": "test",
            "workload": "checkpoint",
            "baseline": first,
            "runs": runs,
            "seed": seed,
            "settings": {"model": "test"},
            **experiment,
        },
        "subject": {"description": "a state", "tensors": 1, "bytes": GIB, "dtypes": {"float16": GIB}},
        "measures": MEASURES,
        "arms": [
            {
                "name": name,
                "role": roles.get(name, "arm"),
                "settings": dict((settings or {}).get(name, {})),
                "places": (places or {}).get(name, [{"kind": "arm"}]),
            }
            for name in sorted(truths, key=lambda name: name != first)
        ],
        "cells": [instead.get((entry["arm"], entry["block"]), entry) for entry in cells],
    }


def results(made: Mapping[str, Any]) -> Results:
    """Return a document as the results that are read from its file."""
    return msgspec.convert(made, Results)


def summarise(made: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary of a document in the form in which its file stores it."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(summary.summarise(results(made))))
    return found


def rounds(cells: Iterable[CellRecord]) -> Results:
    """Return the results of rounds in one process with these cells."""
    cells = tuple(cells)
    arms = tuple(map(Arm, dict.fromkeys(cell.arm for cell in cells)))
    return Results(experiment=Experiment("rounds", "", seed=0), measures=(), arms=arms, cells=cells)
