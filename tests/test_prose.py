"""Plain English: code, tests and pages do not use the words of a former private vocabulary."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *(path for folder in ("src", "tests", "docs", "examples", "benchmarks") for path in (ROOT / folder).rglob("*")),
]
FILES = [
    path
    for path in PAGES
    if (path.suffix in {".py", ".md", ".j2", ".js"} and path != Path(__file__))
    or (path.suffix == ".json" and path.is_relative_to(ROOT / "src" / "tensorkeep"))
]

# Pattern of the banned words -> the words to use instead.
BANNED = {
    r"\bexams?\b": "conformance suite, test",
    r"\bsabotag": "broken on purpose",
    r"\brehears": "warm up",
    r"\bplacebo": "A/A control",
    r"\brooms?\b": "package, layer",
    r"\bhouse rules?\b": "rules of the tree",
    # `tell` is a method of files.
    r"\btold\b|\btells\b|(?<!\.)(?<!def )\btell\b": "reports, logs, raises, records",
    r"\bgo(es)? on\b|\bwent on\b|\bgoing on\b": "resume, continue",
    r"\bproducts? of matrices\b": "matmuls",
    r"\bwait_for_all\b|\bof_first\b": "barrier, broadcast",
    r"\bthere (is|are) none\b": "does not exist",
    r"\bvouch": "not trusted",
    r"\bnone of ours\b": "written by another tool",
    r"\bto be had\b": "supported, available",
    r"\bmemory does not hold\b": "out of memory",
    r"\bslip of the pen\b": "typo",
    r"\banew\b": "again",
    r"\ba test holds that\b": "a test checks that",
    # "There is no" is plain English, as is a noun phrase on the next line.
    r"(?<=\S )(?<!there )\bis no (?!longer\b)\w": "is not a",
    r"\bthe sentence names\b": "the text reports",
    r"\bpassed over\b": "skipped",
}


@pytest.fixture(scope="module")
def texts() -> dict[Path, str]:
    """Read each file once, in lower case: searching without regard to case takes much longer."""
    return {path: path.read_text().lower() for path in FILES}


@pytest.mark.parametrize(("words", "instead"), BANNED.items())
def test_banned_words_are_not_used(words: str, instead: str, texts: dict[Path, str]) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for path, text in texts.items()
        for match in re.finditer(words, text)
    ]
    assert not found, f"write: {instead}\n" + "\n".join(found)
