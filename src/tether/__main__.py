"""`python -m tether` is the command `tether`."""

from tether.commands.cli import main

main()
