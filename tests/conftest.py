"""The profile of property tests, and the number of fault cases of each file at the end of a run."""

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, settings

# A shared machine is sometimes slow; tests assert nothing about time.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Add up the counts that tests recorded with ``record_property("cases", n)``, from all workers."""
    cases: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                counts = [value for name, value in report.user_properties if name == "cases"]
                cases[report.nodeid.partition("::")[0]] += sum(counts)
    cases = +cases
    if cases:
        terminalreporter.section("cases of the fault tests")
        for file, count in sorted(cases.items()):
            terminalreporter.write_line(f"{count:>7,} {file}")
        terminalreporter.write_line(f"{cases.total():>7,} in all")
