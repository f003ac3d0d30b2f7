"""One YAML file as plain nested data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from tether.config.problems import ConfigError, Problem


def read_yaml(path: Path) -> dict[Any, Any]:
    """Read a file of keys; interpolations stand as `${...}`.

    Raises:
        ConfigError: it cannot be read, or holds no keys.
    """
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except OSError as error:
        raise ConfigError(
            [Problem(str(path), f"cannot be read ({error.strerror or error})", "give a YAML file")]
        ) from error
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        what = f"cannot be read as YAML ({' '.join(str(error).split())})"
        raise ConfigError([Problem(str(path), what, "correct that line")]) from error
    if not isinstance(tree, dict):
        raise ConfigError([Problem(str(path), "holds a list, not keys", "write key: value lines")])
    return tree
