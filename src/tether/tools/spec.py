"""Which tools and environments there are, read from files of verl's layout.

Tools (`multi_turn.tool_config_path`); `tool_schema` may be left out where the class has a `schema`::

    tools:
      - class_name: tools.py:Calculator        # or package.module.Class
        config: {digits: 6}
        tool_schema:
          type: function
          function: {name: calculator, description: ..., parameters: {type: object, properties: {...}}}

Or the tools of MCP servers, in verl's layout, whose `class_name` has no effect here::

      - config: {type: mcp}
        mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [search]}     # without the list: all
    # servers.json: {"mcpServers": {"name": {"command": "python", "args": ["server.py"]}, "other": {"url": ...}}}

Environments (`multi_turn.interaction_config_path`); rows name theirs in `extra_info.interaction_kwargs.name`::

    interaction:
      - {name: referee, class_name: "referee.py:Referee", config: {}}
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Signature
from pathlib import Path
from typing import Any

import yaml

from tether.runtime.user_files import missing_file
from tether.spelling import closest, did_you_mean
from tether.types import JsonObject

SECTION = "actor_rollout_ref.rollout.multi_turn"
TOOLS_KEY, ENVIRONMENTS_KEY = f"{SECTION}.tool_config_path", f"{SECTION}.interaction_config_path"


@dataclass(frozen=True)
class ToolSpec:
    """One entry of a tool configuration."""

    class_name: str
    config: JsonObject
    schema: JsonObject | None
    """As OpenAI's functions have it; None: the class has one."""
    place: str
    """Of the entry, for messages."""


@dataclass(frozen=True)
class McpSpec:
    """An entry for the tools of MCP servers."""

    servers: Mapping[str, JsonObject]
    """By name: ``command`` with ``args`` and ``env``, or ``url``, maybe with ``auth_token``."""
    selected: tuple[str, ...]
    """Names of tools; none: all."""
    file: str
    """That names the servers."""
    place: str
    """Of the entry, for messages."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """A class that answers every turn."""

    class_name: str
    config: JsonObject = field(default_factory=dict)
    place: str = f"{SECTION} agent_name"
    """Where it is named, for messages."""
    library_name: str = ""
    """Of an environment of a library, as `environment_named` takes it; its class is tether's then."""

    @property
    def title(self) -> str:
        """The name that the user gave."""
        return self.library_name or self.class_name


@dataclass(frozen=True)
class Talkers:
    """Everything that answers the policy in a run."""

    tools: tuple[ToolSpec | McpSpec, ...] = ()
    environments: Mapping[str, EnvironmentSpec] = field(default_factory=dict)
    """By the name that rows give."""
    call_format: str = "hermes"
    """How the policy writes calls of tools, a key of `tether.tools.FORMATS`."""


LIBRARY = "verifiers:"
"""Begins the name of an environment of that library: ``verifiers:NAME?argument=value``."""


def environment_named(name: str, call_format: str, place: str = f"{SECTION} agent_name") -> EnvironmentSpec:
    """The class, or the environment of a library, of a name.

    Args:
        name: ``FILE.py:Class``, or see `LIBRARY`.
        call_format: how the policy writes calls of tools.
        place: where it is named, for messages.
    """
    if not name.startswith(LIBRARY):
        return EnvironmentSpec(name, place=place)
    config = {"environment": name.removeprefix(LIBRARY), "call_format": call_format}
    return EnvironmentSpec("tether.tools.verifiers_environment.Rollout", config, place, name)


def read_tools(path: str) -> tuple[ToolSpec | McpSpec, ...]:
    """Read a tool configuration.

    Raises:
        ValueError: the file is not there, is no YAML or not of the layout above.
    """
    return tuple(
        _mcp(entry, place)
        if "mcp" in entry or _config(entry, place).get("type") == "mcp"
        else ToolSpec(_class_name(entry, place), _config(entry, place), _schema(entry.get("tool_schema"), place), place)
        for entry, place in _entries(path, "tools", TOOLS_KEY)
    )


def _mcp(entry: JsonObject, place: str) -> McpSpec:
    about = entry.get("mcp")
    file = about.get("mcp_servers_config_path") if isinstance(about, dict) else None
    if not isinstance(about, dict) or not isinstance(file, str):
        raise ValueError(f"{place}.mcp.mcp_servers_config_path is missing. Name the JSON file of the MCP servers")
    if not Path(file).expanduser().is_file():
        raise ValueError(f"{place}.mcp.mcp_servers_config_path={missing_file(Path(file).expanduser())}")
    try:
        servers = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))["mcpServers"]
    except (ValueError, KeyError, TypeError, RecursionError):
        servers = None
    if not isinstance(servers, dict) or not servers:
        raise ValueError(f'{file}: no JSON of the form {{"mcpServers": {{NAME: {{...}}}}}}')
    for name, where in servers.items():
        if not isinstance(where, dict) or not any(isinstance(where.get(way), str) for way in ("command", "url")):
            raise ValueError(f"{file}: mcpServers.{name} has neither `command` (with `args`) nor `url`")
        way = "command" if "command" in where else "url"
        _check_known(where, _SERVER_KEYS[way], f"{file}: mcpServers.{name}")
        if where.get("type", _TRANSPORTS[way][0]) not in _TRANSPORTS[way]:
            kinds = ", ".join(_TRANSPORTS[way])
            raise ValueError(f"{file}: mcpServers.{name}.type={where['type']!r}: with `{way}` it is one of {kinds}")
    _check_known(about, ("mcp_servers_config_path", "tool_selected_list"), f"{place}.mcp")
    selected = about.get("tool_selected_list") or []
    if not isinstance(selected, list) or not all(isinstance(tool, str) for tool in selected):
        raise ValueError(f"{place}.mcp.tool_selected_list is {str(selected)[:80]!r}, not a list of names")
    return McpSpec(servers, tuple(selected), file, place)


_SERVER_KEYS = {"command": ("command", "args", "env", "cwd", "type"), "url": ("url", "auth_token", "headers", "type")}
_TRANSPORTS = {"command": ("stdio",), "url": ("http", "streamable-http", "streamable_http")}
"""What `type` may say of a server, which other clients ask for."""


def _check_known(entry: Mapping[str, object], known: Collection[str], place: str) -> None:
    for key in entry:
        if key not in known:
            hint = did_you_mean(str(key), known) or f" Leave it out; there are {', '.join(known)}."
            raise ValueError(f"{place}.{key} has no effect.{hint}")


def read_environments(path: str) -> dict[str, EnvironmentSpec]:
    """Read a configuration of environments.

    Raises:
        ValueError: as `read_tools`, or two have one name.
    """
    found: dict[str, EnvironmentSpec] = {}
    for entry, place in _entries(path, "interaction", ENVIRONMENTS_KEY):
        name = entry.get("name")
        if not isinstance(name, str) or not name or name in found:
            raise ValueError(f"{place}.name is {name!r}. Give each environment a name of its own")
        found[name] = EnvironmentSpec(_class_name(entry, place), _config(entry, place), place)
    return found


def class_problem(spec: ToolSpec | EnvironmentSpec, names: Collection[str], takes: Signature | None) -> str:
    """The fault of the class of an entry; empty if there is none.

    Args:
        spec: the entry.
        names: that the class has.
        takes: the arguments of the class, where they are known.
    """
    if isinstance(spec, ToolSpec):
        is_own, lacks = "call" in names, "has no method `call` (or `execute`, as verl's have)"
        is_verls = "execute" in names
    else:
        is_own, lacks = {"reset", "step"} <= {*names}, "has no methods `reset` and `step`"
        is_verls = {"start_interaction", "generate_response"} <= {*names}
    if not is_own and not is_verls:
        return lacks
    if is_own and takes is not None:
        try:
            takes.bind(**spec.config)
        except TypeError as error:
            return f"cannot be made with config {spec.config} (TypeError: {error})"
    return ""


def schema_problem(schema: object) -> str:
    """The fault of a tool's schema; empty if there is none."""
    function = schema.get("function") if isinstance(schema, Mapping) else None
    if not isinstance(function, Mapping):
        return "no mapping with `type: function` and `function: {name, description, parameters}`"
    if not isinstance(function.get("name"), str) or not function["name"]:
        return "function.name is missing: the model calls the tool by it"
    if not isinstance(function.get("parameters", {}), Mapping):
        return "function.parameters is no mapping (a JSON schema)"
    return ""


def _schema(schema: Any, place: str) -> JsonObject | None:
    if schema is None:
        return None
    if problem := schema_problem(schema):
        raise ValueError(f"{place}.tool_schema: {problem}")
    return {"type": "function", **schema}


def _entries(path: str, section: str, key: str) -> Iterator[tuple[JsonObject, str]]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"{key}={missing_file(file)}")
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{key}={path}: cannot be read as YAML ({' '.join(str(error).split())})") from error
    entries = tree.get(section) if isinstance(tree, Mapping) else None
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        keys = list(map(str, tree)) if isinstance(tree, Mapping) else []
        near = [name for name in closest(section, keys) if name != section]
        hint = f" There is `{near[0]}`; call it `{section}`." if near else ""
        raise ValueError(
            f"{key}={path}: no list under `{section}:`.{hint} It holds entries {{class_name, config, ...}}"
        )
    for number, entry in enumerate(entries):
        place = f"{key}={path}: {section}[{number}]"
        if not isinstance(entry, dict):
            raise ValueError(f"{place} is {str(entry)[:80]!r}, not a mapping {{class_name, config, ...}}")
        yield entry, place


def _class_name(entry: Mapping[str, object], place: str) -> str:
    name = entry.get("class_name")
    if not isinstance(name, str) or "." not in name:
        near = [key for key in closest("class_name", map(str, entry)) if key != "class_name"]
        instead = f" (there is {near[0]})" if near else ""
        raise ValueError(
            f"{place}.class_name is {name!r}{instead}. Name a class: FILE.py:Class, or package.module.Class"
        )
    return name


def _config(entry: Mapping[str, object], place: str) -> JsonObject:
    config = entry.get("config") or {}
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise ValueError(f"{place}.config is {str(config)[:80]}, not a mapping of the arguments of the class")
    kind = config.get("type", "native")
    if kind != "native":
        raise ValueError(f"{place}.config.type={kind!r}: tether calls Python classes (`native`), so far nothing else")
    return {key: value for key, value in config.items() if key != "type"}
