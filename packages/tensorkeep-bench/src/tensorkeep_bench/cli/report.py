"""``tensorkeep report``: the tables, page, plots and CSV files of a results file."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import msgspec

from tensorkeep.errors import TensorkeepError
from tensorkeep.ext.cli import DEFAULT, Output, Switch, Table, print_lines
from tensorkeep.ext.pages import ReportTable, check_page
from tensorkeep_bench.analysis.samples import too_small
from tensorkeep_bench.analysis.summary import summarise
from tensorkeep_bench.report import sentences, tables
from tensorkeep_bench.results import Results, read_results
from tensorkeep_bench.wording import capitalised

# These two print milliseconds and improvements, as their original scripts did; all others print mean ± std.
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
) -> None:
    """Print the tables of a results file and write its report.

    Without --out, everything is written beside the results: report.html, summary.csv, samples.csv, and a folder plots.
    With --out, only the page and the folders given by --plots and --csv are written.

    Parameters
    ----------
    results
        A results.json, or the folder that holds it.
    out
        The page to write, which opens offline in any browser; an earlier report there is replaced.
    plots
        A folder for every plot, as PNG and SVG.
    csv
        A folder for summary.csv and samples.csv.
    tables_only
        Print the tables, and write nothing.
    """
    found = read_results(results)
    # An earlier version may have written the file: the samples are the same, the rules of verdicts are those of today.
    found = msgspec.structs.replace(found, summary=summarise(found))
    folder = results if results.is_dir() else results.parent
    if tables_only:
        output.show(_document(found, []), lambda: print_tables(found))
    elif out is None:
        _write(found, folder / "report.html", plots or folder / "plots", csv or folder, output)
    else:
        _write(found, out, plots, csv, output)


def _write(found: Results, page: Path, plots: Path | None, csv: Path | None, output: Output) -> None:
    # Only here: tables alone need no page.
    from tensorkeep_bench.report.html import REPORT, write_report

    # Before the tables, so that a wrong --out shows at once.
    check_page(page, REPORT)
    if output.shows_text:
        print_tables(found)
    written = write_report(found, page, plots=plots, csv=csv)
    output.show(_document(found, written), lambda: _print_written(written))


def remove_report(folder: Path) -> None:
    """Remove what `report` wrote beside a results file; DestinationExistsError if ``report.html`` is another page."""
    from tensorkeep_bench.report.html import REPORT, report_files

    page, plots = folder / "report.html", folder / "plots"
    check_page(page, REPORT)
    with suppress(TensorkeepError):  # without results, no report was made from them
        for path in report_files(read_results(folder), page, plots, folder):
            path.unlink(missing_ok=True)
    with suppress(OSError):  # the folder has other files, or does not exist
        plots.rmdir()


def _document(found: Results, written: list[Path]) -> dict[str, Any]:
    return {
        "experiment": found.experiment.name,
        "complete": found.complete,
        "verdict": sentences.verdict_sentence(found),
        "headlines": sentences.headlines(found),
        "written": [str(path) for path in written],
        "summary": msgspec.to_builtins(found.summary),
    }


def print_tables(found: Results) -> None:
    print(found.experiment.title or found.experiment.name)
    print_lines(sentences.measured_by(found))
    if small := too_small(found):
        print(*sentences.headlines(found))
    print()
    # In the format of the scripts that the experiment follows.
    print(tables.six_way_text(found) if found.experiment.name in _MILLISECONDS else tables.isolated_text(found))
    shown = [tables.verdict_table(found, measure) for measure in found.primary()]
    shown += [table for group in tables.design_tables(found).values() for table in group]
    for table in [*shown, tables.observed_table(found), tables.not_run_table(found)]:
        if table.rows:
            print(f"\n{table.title}")
            Table(table.headings, table.texts(), spare=_spare(table.headings)).show()
    _print_claims(tables.claims_table(found))
    rules = [rule for measure in found.primary() for rule in tables.verdict_rules(found, measure)]
    _print_section("Verdicts", list(dict.fromkeys(rules)))
    _print_section("Noise", [] if small else sentences.noise_lines(found))
    _print_section("Effects that this design cannot separate", tables.aliases_lines(found))
    warnings = [f"{one.text}: {one.remedy}" if one.remedy else one.text for one in found.summary.warnings]
    _print_section("Warnings", warnings)
    # The end of a long output stays on the screen.
    lines = (sentences.completeness(found), *sentences.headlines(found), sentences.verdict_sentence(found))
    _print_section("Verdict", [line for line in dict.fromkeys(lines) if line])
    advice = found.summary
    recommended = [(capitalised(one.text), one.use) for one in advice.recommendations]
    _print_section("Recommended for this machine", _with_uses(recommended))
    tries = [(f"{place}. {one.text}", one.use) for place, one in enumerate(advice.try_first, start=1)]
    _print_section("Try first, in this order", _with_uses(tries))
    _print_section("Avoid", [one.text for one in advice.avoid])


def _with_uses(advice: list[tuple[str, str]]) -> list[str]:
    return [line for text, use in advice for line in (text, f"    {use}") if line.strip()]


def _spare(headings: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns of a table of verdicts that a narrow terminal may leave out, the most important one first."""
    names = [heading.lstrip(">=") for heading in headings]
    first = ["95% interval"]
    # Tables without verdicts have no columns to spare.
    if not {"verdict", "gain", *first} <= {*names}:
        return ()
    return (*first, *(name for name in names if name not in ("arm", "verdict", "gain", *first)))


def _print_claims(table: ReportTable | None) -> None:
    if table is None:
        return
    # A list, because the sentences of claims are too long for columns.
    print(f"\n{table.title}")
    before = ""
    for id_, verdict, claim, published, measured, reason in table.texts():
        print_lines(f"  {id_}  {claim}: {verdict}")
        # Figures of one comparison follow each other, and were measured once.
        again = "as above" if measured == before != "-" else measured
        for word, text in (("published", published), ("measured", again), ("reason", reason)):
            if text not in ("", "-"):
                print_lines(f"    {word.ljust(9)}  {text}")
        before = measured


def _print_section(title: str, lines: list[str]) -> None:
    if lines:
        print_lines("", title, *(f"  {line}" for line in lines))


def _print_written(written: list[Path]) -> None:
    page, *others = written
    print_lines("", f"wrote {page}")
    for folder in dict.fromkeys(path.parent for path in others):
        print_lines(f"wrote {folder}: {', '.join(path.name for path in others if path.parent == folder)}")
