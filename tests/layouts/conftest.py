"""After the layouts have run: how far the farthest one was from a single process."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    worst: dict[str, float] = {}
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name.startswith("float") and isinstance(value, float):
                worst[name] = max(worst.get(name, 0.0), value)
    for name, value in worst.items():
        terminalreporter.write_line(f"largest relative difference over layouts, {name}: {value:.1e}")
