"""Errors of the processes of a run on several devices."""

STATUS = "ranks/status.json"
"""In the folder of a run: what each rank does."""


class RankFailed(ValueError):
    """A rank raised an error, or could not be started; the message names it, and why."""


class RankLost(RankFailed):
    """A rank died, gave no answer, or lost the others: to start again may help; the message has its last lines."""

    instead: tuple[str, int] | None = None
    """Key and value with which to start again, where a rank had no memory for its micro-batch."""
