"""After the variants have trained: a table of what they reached."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows = [
        value
        for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
        for name, value in report.user_properties
        if name == "variant"
    ]
    if rows:
        terminalreporter.write_line(
            f"{'variant':<28}{'parameters':>11}{'steps':>7}{'train':>9}{'valid':>9}{'unigram':>9}"
        )
    for label, parameters, steps, *bits in rows:
        terminalreporter.write_line(f"{label:<28}{parameters:>11,}{steps:>7}" + "".join(f"{x:>9.4f}" for x in bits))
