"""The `tether` command."""


def main() -> None:
    """Entry point."""
