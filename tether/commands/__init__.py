"""The command line, on top of `tether.assembly`."""
