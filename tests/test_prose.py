"""Plain English: code, tests and pages do not use the words of a former private vocabulary."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *(path for folder in ("packages", "tests", "docs", "examples") for path in (ROOT / folder).rglob("*")),
]
FILES = [
    path
    for path in PAGES
    if (path.suffix in {".py", ".md", ".j2", ".js"} and path != Path(__file__))
    or (path.suffix == ".json" and path.is_relative_to(ROOT / "packages") and "src" in path.parts)
]

# How banned words start, in lower case, and the pattern of the rest -> the words to use instead.
BANNED = {
    ("exam", r"s?\b"): "conformance suite, test",
    ("sabotag", ""): "broken on purpose",
    ("rehears", ""): "warm up",
    ("placebo", ""): "A/A control",
    ("room", r"s?\b"): "package, layer",
    ("house rule", r"s?\b"): "rules of the tree",
    ("told", r"\b"): "reports, logs, raises, records",
    # `tell` is a method of files.
    ("tell", r"(s|(?<!\.tell)(?<!def tell))\b"): "reports, logs, raises, records",
    ("go", r"(es|ing)? on\b"): "resume, continue",
    ("went on", r"\b"): "resume, continue",
    ("product", r"s? of matrices\b"): "matmuls",
    ("wait_for_all", r"\b"): "barrier",
    ("of_first", r"\b"): "broadcast",
    ("there is none", r"\b"): "does not exist",
    ("there are none", r"\b"): "do not exist",
    ("vouch", ""): "not trusted",
    ("none of ours", r"\b"): "written by another tool",
    ("to be had", r"\b"): "supported, available",
    ("memory does not hold", r"\b"): "out of memory",
    ("slip of the pen", r"\b"): "typo",
    ("anew", r"\b"): "again",
    ("a test holds that", r"\b"): "a test checks that",
    # "There is no" is plain English, as is a noun phrase on the next line.
    ("is no ", r"(?<=\S is no )(?<!there is no )(?!longer\b)\w"): "is not a",
    ("the sentence names", r"\b"): "the text reports",
    ("passed over", r"\b"): "skipped",
}
# A pattern that begins with letters is found many times faster than one that begins with a condition.
PATTERNS = [(re.compile(rf"{start}(?<=\b{start}){rest}"), instead) for (start, rest), instead in BANNED.items()]


def found_in(text: str) -> list[tuple[int, str]]:
    """Return the line and what is to be written instead of each banned word."""
    return [
        (text.count("\n", 0, match.start()) + 1, f"{match[0]}; write: {instead}")
        for pattern, instead in PATTERNS
        for match in pattern.finditer(text)
    ]


def test_banned_words_are_not_used() -> None:
    # In lower case: searching without regard to case takes much longer.
    found = [
        f"{path.relative_to(ROOT)}:{line}: {words}"
        for path in FILES
        for line, words in found_in(path.read_text().lower())
    ]
    assert not found, "\n".join(found)


def test_banned_words_are_found() -> None:
    good = "good, rooming, file.tell(), def tell, there is no way, it is no longer,\nis no, contest holds, go once"
    assert found_in(good) == []
    bad = "two rooms\nhe tells\ntell me\ngoing on\ngoes on\ngo on\nit is no way\nexam.\nplacebos\nanew"
    assert [line for line, _ in sorted(found_in(bad))] == [*range(1, 11)]
