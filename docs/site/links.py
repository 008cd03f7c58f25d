"""Check every link, anchor and resource of a built site: ``python docs/site/links.py build/site``.

Links to other hosts are not requested. What a page loads (scripts, styles, pictures) must be a file of the site.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADED = {"script": "src", "img": "src", "link": "href", "source": "src", "iframe": "src"}


class _Page(HTMLParser):
    """The anchors of a page, its links, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attributes}
        self.anchors.update(found[name] for name in ("id", "name") if name in found)
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in _LOADED and _LOADED[tag] in found:
            self.loaded.append(found[_LOADED[tag]])


def problems(site: Path) -> list[str]:
    """Return what is wrong with the links of a site, a line for each."""
    pages = {path.resolve(): _Page(path.read_text()) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site}: no pages"]
    for path, page in pages.items():
        for link in (*page.links, *page.loaded):
            reason = _problem(link, path, pages)
            if reason is None and link in page.loaded and urlsplit(link).netloc:
                reason = "is loaded from another host"
            if reason is not None:
                found.append(f"{path.relative_to(site.resolve())}: {link} {reason}")
    return found


def _problem(link: str, page: Path, pages: dict[Path, _Page]) -> str | None:
    url = urlsplit(link)
    if url.scheme or url.netloc:
        return None if url.scheme in ("https", "http", "data", "mailto") else "has an unknown scheme"
    target = (page.parent / unquote(url.path)).resolve() if url.path else page
    if not target.is_file():
        return "does not exist"
    if url.fragment and target in pages and unquote(url.fragment) not in pages[target].anchors:
        return "has an anchor that does not exist"
    return None


if __name__ == "__main__":
    lines = problems(Path(sys.argv[1]))
    print("\n".join(lines) or "every link and anchor exists")
    sys.exit(bool(lines))
