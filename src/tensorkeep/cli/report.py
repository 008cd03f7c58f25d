"""``tensorkeep report``: the tables, plots and the page of a run of the bench, from its results file alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from tensorkeep.bench.results import Results, read_results
from tensorkeep.bench.results import printable as clean
from tensorkeep.cli.options import Switch
from tensorkeep.cli.output import DEFAULT, Output
from tensorkeep.cli.text import Table, printable
from tensorkeep.report import design_tables, origin_tables, tables
from tensorkeep.report.headline import completeness, headlines
from tensorkeep.report.sheet import Sheet
from tensorkeep.report.wording import measured_by, sentence

# The three-way and six-way guides printed milliseconds and improvements; the isolated suite prints mean ± std.
_MILLISECONDS = ("three-way", "six-way")


def report(
    results: Path,
    /,
    *,
    out: Path | None = None,
    plots: Path | None = None,
    csv: Path | None = None,
    tables_only: Annotated[bool, Switch] = False,
    output: Output = DEFAULT,
) -> int:
    """Print the tables of a results file and write its report.

    Without --out, everything is written beside the results: report.html, summary.csv, samples.csv, and a folder plots.
    With --out, only what is asked for.

    Parameters
    ----------
    results
        A results.json, or the folder that holds it.
    out
        Where to write the page, which opens offline in any browser; an earlier report there is replaced.
    plots
        A folder for every plot, as PNG and SVG.
    csv
        A folder for summary.csv and samples.csv.
    tables_only
        Print, and write nothing.
    """
    found = read_results(results)
    if tables_only:
        output.show(_document(found, []), lambda: print_tables(found))
        return 0
    folder = results if results.is_dir() else results.parent
    beside = out is None
    page = folder / "report.html" if out is None else out
    _deliver(found, page, plots or (folder / "plots" if beside else None), csv or (folder if beside else None), output)
    return 0


def deliver(results: Path, page: Path, output: Output) -> None:
    """Print the tables of a results file, and write its page with CSV files and a folder ``plots`` beside it."""
    _deliver(read_results(results), page, page.parent / "plots", page.parent, output)


def _deliver(found: Results, page: Path, plots: Path | None, csv: Path | None, output: Output) -> None:
    from tensorkeep.report.write import check_page, write_report

    check_page(page)
    if not output.json and not output.quiet:
        print_tables(found)
    written = write_report(found, page, plots=plots, csv=csv)
    output.show(_document(found, written), lambda: _print_written(written))


def _document(found: Results, written: list[Path]) -> dict[str, Any]:
    import msgspec

    return {
        "experiment": found.experiment.name,
        "complete": found.complete,
        "headlines": headlines(found),
        "written": [str(path) for path in written],
        "summary": msgspec.to_builtins(found.summary),
    }


def print_tables(found: Results) -> None:
    """Print what a person wants to read of a run, the verdict last: that is what is still on the screen."""
    print(clean(found.experiment.title or found.experiment.name))
    print(measured_by(found))
    print()
    milliseconds = found.experiment.name in _MILLISECONDS
    print(origin_tables.six_way_text(found) if milliseconds else origin_tables.isolated_text(found))
    for measure in found.primary():
        _print_sheet(tables.verdict_table(found, measure))
    more = [*design_tables.steps_tables(found), *design_tables.effects_tables(found)]
    more += [*design_tables.interactions_tables(found), tables.seen_table(found), tables.not_run_table(found)]
    for sheet in more:
        if sheet.rows:
            _print_sheet(sheet)
    _print_claims(found)
    _print_lines("Noise", tables.noise_lines(found))
    _print_lines("Effects that cannot be told apart", design_tables.aliases_lines(found))
    warnings = [": ".join(filter(None, (one.text, one.remedy))) for one in found.summary.warnings or []]
    _print_lines("Warnings", warnings)
    _print_lines("Verdict", [line for line in (completeness(found), *headlines(found)) if line])
    advice = [sentence(one.text) for one in found.summary.recommendations or []]
    _print_lines("Recommended for this machine", advice)


def _print_sheet(sheet: Sheet) -> None:
    print(f"\n{sheet.title}")
    Table(sheet.headings, sheet.texts()).show()


def _print_claims(found: Results) -> None:
    """Print claims one below the other: their sentences are too long for columns."""
    sheet = design_tables.claims_table(found)
    if sheet is None:
        return
    print(f"\n{sheet.title}")
    for id_, verdict, text, theirs, ours, reason in sheet.texts():
        print(f"  {id_}  {text}: {verdict}")
        for word, said in (("theirs", theirs), ("ours", ours), ("why", reason)):
            if said not in ("", "-"):
                print(f"    {word.ljust(6)}  {said}")


def _print_lines(title: str, lines: list[str]) -> None:
    if lines:
        print(f"\n{title}")
        for line in lines:
            print(f"  {clean(line)}")


def _print_written(written: list[Path]) -> None:
    print()
    for path in written[:1]:
        print(printable(f"wrote {path}"))
    for folder in dict.fromkeys(path.parent for path in written[1:]):
        names = ", ".join(path.name for path in written[1:] if path.parent == folder)
        print(printable(f"wrote {folder}: {names}"))
