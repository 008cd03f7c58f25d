"""Writing a report: the page, and beside it or elsewhere the plots and the CSV files."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from tensorkeep.bench.results import Results, read_results
from tensorkeep.errors import DestinationExistsError, StoreError, UsageError
from tensorkeep.report.csv_files import samples_csv, summary_csv
from tensorkeep.report.html import MARK, report_page
from tensorkeep.report.plots import draw_plots

PAGE = "report.html"


def write_report(
    results: str | os.PathLike[str] | Results,
    out: str | os.PathLike[str],
    *,
    plots: str | os.PathLike[str] | None = None,
    csv: str | os.PathLike[str] | None = None,
) -> list[Path]:
    """Write the page, and plots and CSV files where a folder for them is given.

    Parameters
    ----------
    results : path-like or Results
        A results file, the folder that holds it, or what was read from it.
    out : path-like
        The page, ``*.html``. An earlier report is replaced, nothing else is.
    plots : path-like, optional
        A folder for each plot as PNG and SVG; files of these names are replaced.
    csv : path-like, optional
        A folder for ``summary.csv`` and ``samples.csv``, which are replaced.

    Returns
    -------
    list of Path
        What was written, the page first.

    Raises
    ------
    UsageError
        If ``out`` is no ``*.html``.
    DestinationExistsError
        If ``out`` is something else than a report.
    MissingExtraError
        If matplotlib or jinja2 is not installed.
    StoreError
        If the operating system refuses.
    """
    page = Path(out)
    check_page(page)
    found = results if isinstance(results, Results) else read_results(results)
    drawn = draw_plots(found)
    files: dict[Path, bytes] = {page: report_page(found, drawn).encode()}
    if plots is not None:
        for plot in drawn:
            files[Path(plots) / f"{plot.name}.png"] = plot.png()
            files[Path(plots) / f"{plot.name}.svg"] = plot.file_svg().encode()
    if csv is not None:
        files[Path(csv) / "summary.csv"] = summary_csv(found).encode()
        files[Path(csv) / "samples.csv"] = samples_csv(found).encode()
    for path, content in files.items():
        _write(path, content)
    return list(files)


def check_page(page: Path) -> None:
    """Raise unless the page may be written: it is called ``*.html``, and what is there already is a report."""
    if page.suffix.lower() not in (".html", ".htm"):
        raise UsageError("the report is a page of HTML", path=page, remedy="give a name that ends in .html")
    try:
        with page.open("rb") as file:
            opening = file.read(256)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"cannot write the report: {error.strerror}", path=page) from error
    if MARK.encode() not in opening:
        raise DestinationExistsError("is there already and is no report", path=page, remedy="give another --out")


def _write(path: Path, content: bytes) -> None:
    """Write a file under another name first: a reader, and a full disk, must not leave half a report."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StoreError(f"cannot write the report: {error.strerror}", path=path) from error
