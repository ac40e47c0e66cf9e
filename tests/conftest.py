"""Prints, at the end of every session, how long the tests of each directory took."""

from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):  # of set-up, call or tear-down
                seconds["/".join(report.nodeid.split("/")[:2])] += report.duration
    terminalreporter.section("seconds per directory")
    for directory, total in seconds.most_common():
        terminalreporter.write_line(f"{total:8.1f}  {directory}")
