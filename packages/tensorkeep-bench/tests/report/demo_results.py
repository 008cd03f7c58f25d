"""The results of a demo, made up: a slow tool scaled from a smaller state, a silent flip, a broken file, two runs."""

from msgspec.structs import replace

from documents import document, results, rounds, truth
from tensorkeep.checkpoint.verify import VerifyReport
from tensorkeep.formats.base import Problem
from tensorkeep_bench.analysis.summary import summarise
from tensorkeep_bench.demo.faults import BitFlip, DamageReport, KilledSave, PeerDamage
from tensorkeep_bench.demo.speed import TOOLS, SmallRun
from tensorkeep_bench.demo.training import ComparedRuns
from tensorkeep_bench.report.demo import DemoResults
from tensorkeep_bench.results import CellRecord

GB = 10**9
NAME = "<b>layers.0</b>.weight"


def demo_results() -> DemoResults:
    """Return the results; the names are hostile to HTML."""
    cells = [
        CellRecord(arm, block, "ok", figures={"save": 1.0 + place, "load_first": 0.5 + place, "stored": GB * 1.0})
        for block in range(3)
        for place, arm in enumerate(TOOLS)
    ]
    six_way = results(document({"tensorstore": truth(60.0), "pytorch": truth(), "tensorkeep": truth(0.5)}, runs=1))
    problem = Problem("the checksum of its stored bytes is wrong", "model.safetensors", NAME, 3)
    return DemoResults(
        source=None,
        description="1.00 GB of random weights",
        tensors=9,
        state_bytes=GB,
        rounds=rounds(cells),
        t5x=SmallRun(GB // 10, {"save": 4.0, "load_first": 1.0, "stored": GB / 12}),
        intact=VerifyReport("x", "native", True, "xxh3-64 of every block", 9, GB, []),
        damage=DamageReport(
            BitFlip("model.safetensors", 100, NAME, 3, 1, 0),
            VerifyReport("x", "native", False, "xxh3-64 of every block", 9, GB, [problem]),
            problem.message,
        ),
        peers=[
            PeerDamage("torch", "damaged.pt", 12345, NAME, 0.01, 3e36, None),
            PeerDamage("safetensors", "damaged.safetensors", 99, NAME, 0.01, None, "no such tensor"),
        ],
        kills=[
            KilledSave("torch", 0.3, GB // 2, GB, "failed finding central directory"),
            KilledSave("tensorkeep", 0.2, GB // 2, GB, None),
        ],
        training=ComparedRuns([4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 2.0, 1.0], 3, 2),
        six_way=replace(six_way, summary=summarise(six_way)),
    )
