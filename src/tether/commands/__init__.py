"""The command line (`cli`) and the Python API (`python`, `policy`, `result`), on top of `tether.assembly`.

Each command is a module of its own, imported when it is called: ``tether --help`` loads neither torch nor pydantic.
"""

__all__ = ["cli", "policy", "python", "result"]
