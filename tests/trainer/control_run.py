"""Embodied runs in this process, by the trainer and by the commands that a user types."""

from typer.testing import CliRunner

from tether.assembly.control import build_control_run
from tether.commands.cli import app
from tether.config import load_config


def train(overrides, until=None):
    """Train in this process, at most up to a step at which a signal is said to come."""
    run = build_control_run(load_config(None, overrides))
    try:
        run.trainer.fit(lambda: until is not None and run.trainer.step_number >= until)
    finally:
        run.close()
    return run


def call(*arguments):
    """The output of a command, which has to succeed."""
    shown = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert shown.exit_code == 0, f"{shown.output} {shown.exception}"
    return shown.output
