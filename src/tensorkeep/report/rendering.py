"""Pages of HTML that need no other file: fills a template, inlines style and script, marks the page.

The templates, style and script of all pages are in ``report/page``; a `PageKind` adds files of another package.
"""

import base64
import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from tensorkeep.errors import DestinationExistsError, MissingExtraError, StoreError, UsageError, installation_of
from tensorkeep.report.canvas import PALETTE


@dataclass(frozen=True, slots=True)
class PageKind:
    """A kind of page.

    Attributes
    ----------
    command : str
        The command that writes it; it marks the first bytes, so that a page never replaces any other file.
    noun : str
        What it is called in errors.
    extra : str
        The extra that installs what it needs.
    package : str or None
        The package that has, in its folder ``page``, the template and more style and script.
    """

    command: str
    noun: str
    extra: str
    package: str | None = None

    @property
    def mark(self) -> str:
        """The opening tag of the page."""
        return f'<html lang="en" data-made-by="tensorkeep-{self.command}">'

    def files(self, suffix: str) -> str:
        """Return the content of the style sheets, or of the scripts."""
        own = "" if self.package is None else self.file(f"{self.command}.{suffix}")
        return _file("tensorkeep.report", f"report.{suffix}") + own

    def file(self, name: str) -> str:
        """Return the content of a file, from ``report/page`` if the kind has none of its own."""
        package = self.package
        if package is None or not resources.files(package).joinpath("page", name).is_file():
            package = "tensorkeep.report"
        return _file(package, name)


REPORT = PageKind("report", "report", "bench")


def _file(package: str, name: str) -> str:
    return resources.files(package).joinpath("page", name).read_text(encoding="utf-8")


def check_installed(kind: PageKind) -> None:
    """Raise MissingExtraError if jinja2, which fills the templates, is not installed."""
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        remedy = installation_of(kind.extra)
        raise MissingExtraError("the page needs jinja2, which is not installed", remedy=remedy) from error


def render_page(template: str, kind: PageKind = REPORT, **content: Any) -> str:
    """Return a page, self-contained, with this content.

    Raises MissingExtraError if jinja2 is not installed.
    """
    check_installed(kind)
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(kind.file),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = kind.files("js")
    colours = " ".join(f"--plot-{name}: {colour};" for name, colour in PALETTE.items() if name != "paper")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        mark=kind.mark,
        style=f"{kind.files('css')}:root {{ {colours} }}\n",
        script=script,
        script_hash=f"sha256-{digest}",
        **content,
    )


def check_page(page: Path, kind: PageKind = REPORT) -> None:
    """Raise unless the page may be written: its name ends in ``.html``, and a file of that name is of the same kind."""
    if page.suffix.lower() not in (".html", ".htm"):
        raise UsageError("is not a name of a page of HTML", path=page, remedy="give a name that ends in .html")
    try:
        with page.open("rb") as file:
            opening = file.read(256)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"cannot write the {kind.noun}: {error.strerror}", path=page) from error
    if kind.mark.encode() not in opening:
        raise DestinationExistsError(f"exists and is not a {kind.noun}", path=page, remedy="give another --out")
