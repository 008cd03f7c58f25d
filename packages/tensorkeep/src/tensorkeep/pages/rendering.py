"""Pages of HTML that need no other file: fills a template, inlines style and script, marks the page."""

import base64
import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from tensorkeep.errors import DestinationExistsError, MissingExtraError, StoreError, UsageError, installation_of
from tensorkeep.pages.canvas import PALETTE


@dataclass(frozen=True, slots=True)
class PageKind:
    """A kind of page. Its templates, style and script are in the folder ``page`` of ``package``, or here."""

    # The command that writes the page. It marks the first bytes, so that a page never replaces any other file.
    command: str
    noun: str
    # What installs what the page needs, as `import_extra` takes it; ``noun`` names the page in errors.
    requirement: str
    package: str

    @property
    def mark(self) -> str:
        return f'<html lang="en" data-made-by="tensorkeep-{self.command}">'

    def own_file(self, name: str) -> str | None:
        file = resources.files(self.package).joinpath("page", name)
        return file.read_text(encoding="utf-8") if file.is_file() else None

    def file(self, name: str) -> str:
        return self.own_file(name) or _common_file(name)

    def files(self, suffix: str) -> str:
        """Return the common style or script, and after it the one of this kind if there is one."""
        return _common_file(f"base.{suffix}") + (self.own_file(f"{self.command}.{suffix}") or "")


def _common_file(name: str) -> str:
    return resources.files("tensorkeep.pages").joinpath("page", name).read_text(encoding="utf-8")


def check_installed(kind: PageKind) -> None:
    try:
        import jinja2  # noqa: F401
    except ImportError as error:
        remedy = installation_of(kind.requirement)
        raise MissingExtraError("the page needs jinja2, which is not installed", remedy=remedy) from error


def render_page(template: str, kind: PageKind, **content: Any) -> str:
    """Return a page, self-contained, with this content; MissingExtraError if jinja2 is not installed."""
    check_installed(kind)
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(kind.file),
        # Names and reasons come from results files, which may be hostile.
        autoescape=True,
        # A name that is missing would otherwise be an empty place in the page.
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = kind.files("js")
    colours = " ".join(f"--plot-{name}: {colour};" for name, colour in PALETTE.items() if name != "paper")
    # For the content security policy: the page runs this script only, not one from a results file.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        mark=kind.mark,
        style=f"{kind.files('css')}:root {{ {colours} }}\n",
        script=script,
        script_hash=f"sha256-{digest}",
        **content,
    )


def check_page(page: Path, kind: PageKind) -> None:
    """Raise unless the name ends in ``.html``, and an existing file is a page of the same kind."""
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
