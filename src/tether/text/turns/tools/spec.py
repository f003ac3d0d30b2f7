"""Specifications of tools and environments, read from files in verl's layout.

Tools (`multi_turn.tool_config_path`); `tool_schema` is optional if the class has a `schema`::

    tools:
      - class_name: tools.py:Calculator        # or package.module.Class
        config: {digits: 6}
        tool_schema:
          type: function
          function: {name: calculator, description: ..., parameters: {type: object, properties: {...}}}

Tools of MCP servers, also in verl's layout; their `class_name` has no effect here::

      - config: {type: mcp}
        mcp: {mcp_servers_config_path: servers.json, tool_selected_list: [search]}     # without the list: all
    # servers.json: {"mcpServers": {"name": {"command": "python", "args": ["server.py"]}, "other": {"url": ...}}}

Functions (`multi_turn.function_tool_path`): a Python file whose public functions, or those in its `__all__`, are tools.

Environments (`multi_turn.interaction_config_path`); a row names its own in `extra_info.interaction_kwargs.name`::

    interaction:
      - {name: referee, class_name: "referee.py:Referee", config: {}}

Agents (`agent.agent_loop_config_path`) are environments, too; a row names its own in `agent_name`::

    - {name: referee, _target_: "referee.py:Referee", ARGUMENT: VALUE}
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Signature
from pathlib import Path
from typing import Any, ClassVar

import yaml

from tether.runtime.user_files import missing_file
from tether.spelling import closest, did_you_mean
from tether.types import JsonObject

SECTION = "actor_rollout_ref.rollout.multi_turn"
FUNCTIONS_KEY = f"{SECTION}.function_tool_path"
AGENTS_KEY = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
VERLS_AGENTS = {
    "verl.experimental.agent_loop.single_turn_agent_loop.SingleTurnAgentLoop": "single_turn_agent",
    "verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop": "tool_agent",
}
"""verl's own agents, by class -> their names, which are also tether's."""
TOOLS_KEY, ENVIRONMENTS_KEY = f"{SECTION}.tool_config_path", f"{SECTION}.interaction_config_path"


@dataclass(frozen=True)
class ToolSpec:
    """An entry of a tool configuration."""

    class_name: str
    config: JsonObject
    schema: JsonObject | None
    """Schema in the format of OpenAI's functions; None: the class has one."""
    place: str
    """Position of the entry, for messages."""
    class_key: ClassVar[str] = "class_name"
    """Key of the entry that names the class, for messages."""


@dataclass(frozen=True)
class McpSpec:
    """An entry for the tools of MCP servers."""

    servers: Mapping[str, JsonObject]
    """Connection settings by the server's name: ``command`` with ``args`` and ``env``, or ``url`` with an optional
    ``auth_token``."""
    selected: tuple[str, ...]
    """Names of the tools to use; empty: all."""
    file: str
    """Path of the file that lists the servers."""
    place: str
    """Position of the entry, for messages."""


@dataclass(frozen=True)
class FunctionsSpec:
    """A Python file whose functions are tools."""

    file: str
    place: str
    """Key and file, for messages."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """A class that replies to every turn of the policy."""

    class_name: str
    config: JsonObject = field(default_factory=dict)
    place: str = f"{SECTION} agent_name"
    """Position of the name, for messages."""
    class_key: str = "class_name"
    """Key of the entry that names the class, for messages."""
    library_name: str = ""
    """Name of a library's environment, as passed to `environment_named`; the class then is tether's adapter."""

    @property
    def title(self) -> str:
        """Return the name that the user configured."""
        return self.library_name or self.class_name


@dataclass(frozen=True)
class ResponderSpecs:
    """The tools and environments that reply to the policy in a run."""

    tools: tuple[ToolSpec | McpSpec | FunctionsSpec, ...] = ()
    environments: Mapping[str, EnvironmentSpec] = field(default_factory=dict)
    """Environments by the name that rows use."""
    call_format: str = "hermes"
    """Format of the policy's tool calls, a key of `tether.text.turns.tools.FORMATS`."""


LIBRARY = "verifiers:"
"""Prefix of the names of environments of that library: ``verifiers:NAME?argument=value``."""


def environment_named(name: str, call_format: str, place: str = f"{SECTION} agent_name") -> EnvironmentSpec:
    """Return the specification of an environment by its name.

    Args:
        name: ``FILE.py:Class``, or a library's environment with the prefix `LIBRARY`.
        call_format: format of the policy's tool calls.
        place: position of the name, for messages.
    """
    if not name.startswith(LIBRARY):
        return EnvironmentSpec(name, place=place)
    config = {"environment": name.removeprefix(LIBRARY), "call_format": call_format}
    return EnvironmentSpec(
        "tether.integrations.agents.verifiers_environment.VerifiersConversation", config, place, library_name=name
    )


def read_tools(path: str) -> tuple[ToolSpec | McpSpec, ...]:
    """Read a tool configuration.

    Raises:
        ValueError: the file is missing, is not YAML, or has another layout than the one above.
    """
    return tuple(
        _mcp(entry, place)
        if "mcp" in entry or _config(entry, place).get("type") == "mcp"
        else ToolSpec(_class_name(entry, place), _config(entry, place), _schema(entry.get("tool_schema"), place), place)
        for entry, place in _entries(path, "tools", TOOLS_KEY)
    )


def _mcp(entry: JsonObject, place: str) -> McpSpec:
    options = entry.get("mcp")
    file = options.get("mcp_servers_config_path") if isinstance(options, dict) else None
    if not isinstance(options, dict) or not isinstance(file, str):
        raise ValueError(f"{place}.mcp.mcp_servers_config_path is missing. Name the JSON file of the MCP servers")
    if not Path(file).expanduser().is_file():
        raise ValueError(f"{place}.mcp.mcp_servers_config_path={missing_file(Path(file).expanduser())}")
    try:
        servers = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))["mcpServers"]
    except (ValueError, KeyError, TypeError, RecursionError):
        servers = None
    if not isinstance(servers, dict) or not servers:
        raise ValueError(f'{file}: no JSON of the form {{"mcpServers": {{NAME: {{...}}}}}}')
    for name, settings in servers.items():
        if not isinstance(settings, dict) or not any(isinstance(settings.get(key), str) for key in ("command", "url")):
            raise ValueError(f"{file}: mcpServers.{name} has neither `command` (with `args`) nor `url`")
        key = "command" if "command" in settings else "url"
        _check_keys(settings, _SERVER_KEYS[key], f"{file}: mcpServers.{name}")
        if settings.get("type", _TRANSPORTS[key][0]) not in _TRANSPORTS[key]:
            kinds = ", ".join(_TRANSPORTS[key])
            raise ValueError(f"{file}: mcpServers.{name}.type={settings['type']!r}: with `{key}` it is one of {kinds}")
    _check_keys(options, ("mcp_servers_config_path", "tool_selected_list"), f"{place}.mcp")
    selected = options.get("tool_selected_list") or []
    if not isinstance(selected, list) or not all(isinstance(tool, str) for tool in selected):
        raise ValueError(f"{place}.mcp.tool_selected_list is {str(selected)[:80]!r}, not a list of names")
    return McpSpec(servers, tuple(selected), file, place)


_SERVER_KEYS = {"command": ("command", "args", "env", "cwd", "type"), "url": ("url", "auth_token", "headers", "type")}
_TRANSPORTS = {"command": ("stdio",), "url": ("http", "streamable-http", "streamable_http")}
"""Accepted values of a server's `type`, which other MCP clients require."""


def _check_keys(entry: Mapping[str, object], valid_keys: Collection[str], place: str) -> None:
    for key in entry:
        if key not in valid_keys:
            hint = did_you_mean(str(key), valid_keys) or f" Leave it out; there are {', '.join(valid_keys)}."
            raise ValueError(f"{place}.{key} has no effect.{hint}")


def read_environments(path: str) -> dict[str, EnvironmentSpec]:
    """Read a configuration of environments.

    Raises:
        ValueError: as for `read_tools`, or two environments have the same name.
    """
    environments: dict[str, EnvironmentSpec] = {}
    for entry, place in _entries(path, "interaction", ENVIRONMENTS_KEY):
        name = entry.get("name")
        if not isinstance(name, str) or not name or name in environments:
            raise ValueError(f"{place}.name is {name!r}. Give each environment a name of its own")
        environments[name] = EnvironmentSpec(_class_name(entry, place), _config(entry, place), place)
    return environments


def read_agents(path: str) -> dict[str, EnvironmentSpec]:
    """Read a configuration of agents; verl's own agents need no entry, and an entry under one of their names has no
    effect.

    Raises:
        ValueError: as for `read_tools`, or two agents have the same name.
    """
    agents: dict[str, EnvironmentSpec] = {}
    for entry, place in _entries(path, "", AGENTS_KEY):
        name, target = entry.get("name"), entry.get("_target_")
        if not isinstance(name, str) or not name or name in agents:
            raise ValueError(f"{place}.name is {name!r}. Give each agent a name of its own")
        if not isinstance(target, str) or "." not in target:
            raise ValueError(f"{place}._target_ is {target!r}. Name a class: FILE.py:Class, or package.module.Class")
        own = VERLS_AGENTS.get(target)
        if own == name:
            continue
        if own or name in (*VERLS_AGENTS.values(), "endpoint"):
            what = f"is {own} here" if own else "is an agent of tether's own"
            raise ValueError(f"{place}: {name} {what}. Give the agent its name: {own or 'another one'}")
        config = {key: value for key, value in entry.items() if key not in ("name", "_target_")}
        agents[name] = EnvironmentSpec(target, config, place, "_target_")
    return agents


def class_problem(spec: ToolSpec | EnvironmentSpec, names: Collection[str], signature: Signature | None) -> str:
    """Describe the problem with the class of an entry; empty if there is none.

    Args:
        spec: the entry.
        names: names of the attributes of the class.
        signature: signature of the class, if it is known.
    """
    if isinstance(spec, ToolSpec):
        is_native, problem = "call" in names, "has no method `call` (or `execute`, as verl's tools have)"
        is_verls = "execute" in names
    else:
        is_native, problem = {"reset", "step"} <= {*names}, "has no methods `reset` and `step`"
        if "run" in names:
            problem += "; a loop of verl's (`run`) samples by itself, which tether does for it"
        is_verls = {"start_interaction", "generate_response"} <= {*names}
    if not is_native and not is_verls:
        return problem
    if is_native and signature is not None:
        try:
            signature.bind(**spec.config)
        except TypeError as error:
            return f"cannot be created with config {spec.config} (TypeError: {error})"
    return ""


def schema_problem(schema: object) -> str:
    """Describe the problem with a tool's schema; empty if there is none."""
    function = schema.get("function") if isinstance(schema, Mapping) else None
    if not isinstance(function, Mapping):
        return "no mapping with `type: function` and `function: {name, description, parameters}`"
    if not isinstance(function.get("name"), str) or not function["name"]:
        return "function.name is missing: the model calls the tool by it"
    if not isinstance(function.get("parameters", {}), Mapping):
        return "function.parameters is not a mapping (a JSON schema)"
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
    entries = tree.get(section) if isinstance(tree, Mapping) else tree if not section else None
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        if not section:
            raise ValueError(f"{key}={path}: no list of entries {{name, _target_, ...}}")
        keys = list(map(str, tree)) if isinstance(tree, Mapping) else []
        near = [name for name in closest(section, keys) if name != section]
        hint = f" There is `{near[0]}`; call it `{section}`." if near else ""
        raise ValueError(
            f"{key}={path}: no list under `{section}:`.{hint} It holds entries {{class_name, config, ...}}"
        )
    for index, entry in enumerate(entries):
        place = f"{key}={path}: {section}[{index}]"
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
        raise ValueError(f"{place}.config.type={kind!r}: only `native` (Python classes) and `mcp` are supported")
    return {key: value for key, value in config.items() if key != "type"}
