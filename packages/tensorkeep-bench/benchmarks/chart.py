"""Write ``docs/durable-save.svg`` from ``results/peers-bfloat16.json.gz``: ``python benchmarks/chart.py``.

The chart shows what its caption and its bars say, and a test checks that it is up to date.
"""

from pathlib import Path

from tensorkeep_bench.results import read_results

RESULTS = Path(__file__).parent / "results" / "peers-bfloat16.json.gz"
CHART = Path(__file__).parents[3] / "docs" / "durable-save.svg"
ARMS = {
    "tensorkeep": "Tensorkeep",
    "tensorkeep-lossless": "Tensorkeep, lossless",
    "safetensors": "safetensors",
    "dcp-2": "DCP",
    "tensorstore-raw": "TensorStore",
    "pytorch": "torch.save",
    "orbax": "Orbax, compressed",
}
STYLE = """
text { font: 15px system-ui, "Segoe UI", "Helvetica Neue", Arial, sans-serif; fill: #1f2328 }
.h { font-weight: 600 } .q { fill: #57606a } .e { text-anchor: end }
.own { fill: #1c63b7 } .peer { fill: #8a929c } .ground { fill: #fff; stroke: #d0d7de }
@media (prefers-color-scheme: dark) {
text { fill: #e6e9ec } .q { fill: #a3adb7 }
.own { fill: #4f9dea } .peer { fill: #6b747d } .ground { fill: #14171a; stroke: #3a4048 }
}
"""
WIDTH, LEFT, TOP, ROW, WIDEST = 720, 190, 78, 30, 400


def measured(arm: str) -> float:
    """Return the rate of a durable save of an arm, in GB of raw bytes per second."""
    save = read_results(RESULTS).statistics(arm, "save")
    if save.per_byte is None:
        raise SystemExit(f"{RESULTS}: {arm} was not measured")
    return 1e-9 / save.per_byte


def chart() -> str:
    """Return the chart as SVG."""
    results = read_results(RESULTS)
    rates = sorted(((measured(arm), name) for arm, name in ARMS.items()), reverse=True)
    height = TOP + ROW * len(rates) + 44
    title = f"A durable save of {results.subject.bytes / 1e9:.2f} GB of bfloat16 weights, in GB/s"
    processor = results.environment["processor"]
    cores = f"{processor['usable_cores']} cores of {processor['model']}"
    machine = f"{cores}, a virtual disk; medians of {results.blocks} runs"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" '
        'aria-labelledby="t">',
        f'<title id="t">{title}: {", ".join(f"{name} {value:.2f}" for value, name in rates)}</title>',
        f"<style>{STYLE}</style>",
        f'<rect class="ground" x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="10"/>',
        f'<text class="h" x="20" y="34">{title}</text>',
        '<text class="q" x="20" y="56">longer is better; on the disk when the clock stops</text>',
    ]
    for place, (value, name) in enumerate(rates):
        y = TOP + ROW * place
        kind = "own" if name.startswith("Tensorkeep") else "peer"
        width = WIDEST * value / rates[0][0]
        lines += [
            f'<text class="e" x="{LEFT - 12}" y="{y + 16}">{name}</text>',
            f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{width:.0f}" height="22" rx="3"/>',
            f'<text x="{LEFT + width + 8:.0f}" y="{y + 16}">{value:.2f}</text>',
        ]
    return "\n".join([*lines, f'<text class="q" x="20" y="{height - 16}">{machine}</text>', "</svg>", ""])


if __name__ == "__main__":
    CHART.write_text(chart())
