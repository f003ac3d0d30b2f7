"""A warning about a reward that returns `acc` for some rows only."""

from tether.loop.alarms import Alarms


def test_acc_that_some_rows_lack_is_reported_once_and_is_no_collapse() -> None:
    alarms, warnings = Alarms(), list[str]()
    tested = {"val-core/s/reward/mean@1": 0.1, "val-aux/s/acc/missing_fraction": 0.875}
    for _ in range(3):
        alarms.check_validation(tested, warnings.append)
    assert ["val-aux/s/acc/missing_fraction 0.88" in warning for warning in warnings] == [True]
    assert alarms.collapsed_since is None
    alarms.check_validation({"val-core/s/acc/mean@1": 0.1}, warnings.append)
    assert len(warnings) == 1
