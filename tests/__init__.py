"""The tests, and small models and environments that some benchmarks take from them."""

from importlib.util import find_spec

if find_spec("pytest") is None:
    raise SystemExit("This needs the packages of the tests: pip install -e '.[test]' in the clone")
