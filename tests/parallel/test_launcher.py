"""How long launchers leave their ranks after a signal. That one is missed: tests/faults/test_launchers.py."""

import pytest

from megatron_allattn.parallel.launcher import save_outlasts_launcher


@pytest.mark.parametrize(
    ("variables", "left", "way"),
    [
        ({"CROSS_RANK": "0"}, 30, "DeepSpeed's launcher kills ranks"),
        ({"TORCHELASTIC_RUN_ID": "none"}, 30, "torchrun kills ranks"),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}, 600, "torchrun kills ranks"),
    ],
)
def test_a_save_that_its_launcher_would_kill_is_told(variables: dict[str, str], left: int, way: str) -> None:
    assert save_outlasts_launcher(left - 1.0, variables) is None
    told = save_outlasts_launcher(left + 1.0, variables)
    assert told is not None and f"the {left} s after which {way}" in told and "launch/torchrun.sh" in told


def test_others_leave_it_to_the_run() -> None:
    assert save_outlasts_launcher(10_000.0, {"SLURM_JOB_ID": "1", "PMI_RANK": "0"}) is None
