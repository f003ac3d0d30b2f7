"""Print ``torch==VERSION`` of the torch in this environment if it is as new as the argument, else nothing."""

import sys
from importlib.metadata import PackageNotFoundError, version

from pip._vendor.packaging.version import Version

try:
    installed = Version(version("torch"))
except PackageNotFoundError:
    sys.exit()
if installed >= Version(sys.argv[1]):
    print(f"torch=={installed}")
