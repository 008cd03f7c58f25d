"""`tensorkeep.show`: the page of a checkpoint, a run, or two of either, in Python and in notebooks."""

import html
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tensorkeep.checkpoint.diff import diff
from tensorkeep.checkpoint.options import AllowOption, MemorySize, ProgressOption, drawn
from tensorkeep.errors import PathLike, UsageError
from tensorkeep.pages.checkpoint import read_contents
from tensorkeep.pages.difference import Difference
from tensorkeep.pages.page import SHOW, PageSubject, write_page
from tensorkeep.pages.rendering import check_installed, check_page
from tensorkeep.pages.run import RunComparison, read_figures, read_run
from tensorkeep.pages.statistics import DEFAULT_SAMPLE
from tensorkeep.runs.address import checkpoint_path, steps_of_run
from tensorkeep.storage.buffers import DEFAULT_BUDGET
from tensorkeep.storage.parallel import Progress
from tensorkeep.units import parse_bytes

_HEIGHT = 640


def read_subject(
    given: Sequence[str],
    checkpoint_at: Callable[[str], str],
    *,
    sample: int,
    format: str | None,
    progress: Progress | None,
    **options: Any,
) -> PageSubject:
    """Read one or two checkpoints or runs; ``checkpoint_at`` turns an address into the path of a step."""
    are_runs = all(bool(steps_of_run(each)) for each in given)
    if format is not None and (are_runs or len(given) > 1):
        raise UsageError("a format is for one checkpoint, not for a run or two", remedy="leave it out")
    if are_runs:
        if len(given) > 1:
            return RunComparison((read_figures(given[0]), read_figures(given[1])))
        return read_run(given[0], sample=sample, progress=progress, **options)
    places = [checkpoint_at(each) for each in given]
    if len(places) > 1:
        return Difference(diff(*places, progress=progress, **options))
    return read_contents(places[0], sample=sample, format=format, progress=progress, **options)


class Page:
    """A page about checkpoints or runs; returned by `tensorkeep.show`. A notebook shows it in the output of the cell.

    Attributes
    ----------
    html : str
        One document, which needs no other file and no network.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> saved = tensorkeep.save({"model": {"w": torch.zeros(10, 10)}, "step": 7}, f"{folder.name}/c")
    >>> tensorkeep.show(saved.path).as_dict()["values"]
    {'step': 7}
    >>> folder.cleanup()
    """

    def __init__(self, subject: PageSubject) -> None:
        self._subject = subject
        self.html = subject.page()

    def __repr__(self) -> str:
        return "\n".join([self._subject.heading, *(text for _, text in self._subject.findings())])

    def _repr_html_(self) -> str:
        # A frame, so that neither style nor script meets the notebook's.
        style = f"width: 100%; height: {_HEIGHT}px; border: 0"
        return f'<iframe srcdoc="{html.escape(self.html)}" style="{style}"></iframe>'

    def as_dict(self) -> dict[str, Any]:
        """Return the content as plain values, as ``tensorkeep show --json`` prints it."""
        return self._subject.as_dict()

    def write(self, path: PathLike) -> int:
        """Write the page, and return its bytes.

        Raises
        ------
        UsageError, DestinationExistsError, StoreError
            If the name does not end in ``.html``; if the file exists and is not such a page; if the disk refuses.
        """
        check_page(Path(path), SHOW)
        return write_page(Path(path), self.html)


def show(
    path: PathLike,
    other: PathLike | None = None,
    *,
    sample: int | str = DEFAULT_SAMPLE,
    format: str | None = None,
    progress: ProgressOption = None,
    threads: int | None = None,
    memory_budget: MemorySize = DEFAULT_BUDGET,
    allow: AllowOption = None,
) -> Page:
    """Return a page about a checkpoint, a run, or two of either; the command ``tensorkeep show`` writes the same page.

    Parameters
    ----------
    path : path-like
        A checkpoint, the folder of a run, or a step of a run such as ``"run@1200"``.
    other : path-like, optional
        A second checkpoint, or a second run, to compare with.
    sample : int or str
        Read about so many bytes for the statistics of a checkpoint or run, also as ``"2GiB"``.
    format, progress, threads, memory_budget, allow : optional
        See `tensorkeep.load`.

    Raises
    ------
    MissingExtraError
        If jinja2 is not installed; the error has the command that installs it.
    NotFoundError, NotACheckpointError, CorruptCheckpointError, UnsupportedError, StoreError, UsageError
        As `tensorkeep.load`.

    Examples
    --------
    >>> import tempfile, torch, tensorkeep
    >>> folder = tempfile.TemporaryDirectory()
    >>> saved = tensorkeep.save({"model": {"w": torch.zeros(10, 10)}}, f"{folder.name}/c")
    >>> page = tensorkeep.show(saved.path)
    >>> print(page)  # a notebook shows the page itself
    /...
    All values are finite: neither NaN nor infinity was found.
    1 tensor of zeros only: model.w.
    >>> page.write(f"{folder.name}/c.html") > 10_000
    True
    >>> folder.cleanup()
    """
    check_installed(SHOW)
    given = [os.fspath(each) for each in (path, other) if each is not None]
    with drawn(progress, "comparing" if other is not None else "reading") as callback:
        subject = read_subject(
            given,
            lambda each: os.fspath(checkpoint_path(each)),
            sample=parse_bytes(sample),
            format=format,
            progress=callback,
            threads=threads,
            memory_budget=memory_budget,
            allow=allow,
        )
    return Page(subject)
