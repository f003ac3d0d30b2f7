"""The command line (`cli`) and the Python API (`python`, `policy`, `result`), on top of `tether.text` and
`tether.control`.

Each command is a separate module that is imported when it is called, so that ``tether --help`` loads neither torch nor
pydantic.
"""

__all__ = ["cli", "policy", "python", "result"]
