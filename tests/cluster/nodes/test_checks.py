"""The table: one row for nodes that say the same, faults with their way out, the verdict, nothing for a terminal."""

from megatron_allattn.cluster.nodes.checks import WIDTH, Check, is_go, table, verdict


def check(name: str, node: str, status: str = "ok", found: str = "x", asked: str = "y") -> Check:
    return Check(name=name, node=node, status=status, found=found, asked=asked, way_out="do z")  # type: ignore[arg-type]


def test_a_table() -> None:
    checks = [
        check("python", "n1", found="3.11"),
        check("python", "n2", found="3.11"),
        check("devices", "n1", "unchecked", "no GPU", ""),
        check("devices", "n2", "fault", "7", "8"),
    ]
    assert table(checks, 2).splitlines() == [
        "       check    node   found   asked",
        "ok     python   all 2  3.11    y",
        "-      devices  n1     no GPU",
        "FAULT  devices  n2     7       8",
        "",
        "fault: n2: devices: found 7, asked 8; do z",
        "",
        "no-go: 1 fault on n2",
    ]


def test_verdicts() -> None:
    good, open_question, bad = check("a", "n1"), check("b", "n1", "unchecked"), check("c", "n2", "fault")
    assert [is_go(checks) for checks in ([], [good], [good, open_question], [good, bad])] == [True, True, True, False]
    assert verdict([good]) == "go"
    assert verdict([good, open_question]) == "go (1 not checked)"
    assert verdict([bad, check("d", "n1", "fault")]) == "no-go: 2 faults on n2 and n1"


def test_what_a_report_says_does_not_reach_the_terminal_and_long_cells_are_wrapped() -> None:
    lines = table([check("a", "n1", "fault", "\x1b[2J" + "long words " * 30)], 1).splitlines()
    assert "\x1b" not in "".join(lines)
    assert any("\\x1b[2J" in line for line in lines)
    rows = lines[: lines.index("")]
    assert len(rows) > 3 and all(len(row) < WIDTH + 40 for row in rows)
