import numpy as np, pytest
from tests.support.pool import WorkerPools
from tests.support.trajectories import Case, differences, trajectory

TOK = np.random.default_rng(7).integers(0, 101, 8 * 32 * 40).astype(np.uint8)


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1, 1, 2, "adagrad", "float32", "deepspeed", pipeline=2),
        Case(1, 1, 0, 2, "adam", "float32", "deepspeed", pipeline=2),
        Case(1, 2, 1, 2, "adam", "float32", "deepspeed", pipeline=2),
        Case(2, 1, 1, 4, "adagrad", "float32", "deepspeed", pipeline=2, layers=(1, 2)),
        Case(1, 1, 1, 1, "adagrad", "float32", "deepspeed", pipeline=3),
    ],
    ids=str,
)
def test_it(case, pools: WorkerPools):
    found = pools(case.world_size).run(trajectory, case, TOK, 101, 10, timeout=200)[0]
    exp = pools(1).run(trajectory, case.single(), TOK, 101, 10, timeout=200)[0]
    d = differences(found, exp)
    print(case, d)
    assert max(d.values()) < 1e-5, d
