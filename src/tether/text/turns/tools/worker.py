"""The process that runs tools and environments. It does not import torch.

Requests are pickles of the trainer's own data. Answers are JSON, because objects returned by user code must not execute
code in the trainer.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from tether.integrations import integration
from tether.runtime.channel import Channel
from tether.runtime.event_loop import event_loop, finished
from tether.runtime.install import pip_install
from tether.runtime.printable import install_safe_printing
from tether.runtime.user_files import definition, describe_error, error_location, import_python_file, raised_by_tether
from tether.text.turns.tools.pool import MAX_ANSWER, CallRequest, LoadRequest, Reply, StepRequest
from tether.text.turns.tools.spec import (
    FUNCTIONS_KEY,
    EnvironmentSpec,
    FunctionsSpec,
    McpSpec,
    ResponderSpecs,
    ToolSpec,
    class_problem,
    environment_named,
    schema_problem,
)
from tether.types import JsonObject, Message

_MESSAGE_HEAD = 500  # characters


def serve(channel: Channel) -> None:
    """Answer requests until the trainer is gone.

    The first message has the pickled arguments of `RequestHandler` and the timeout of a call.
    """
    first = channel.receive()
    if first is None:
        return
    specs, server_tools, timeout = pickle.loads(first)
    asyncio.set_event_loop(event_loop())  # for classes whose constructors get the current loop
    install_safe_printing()
    try:
        handler = RequestHandler(specs, server_tools, report=lambda what: channel.send(json.dumps([what]).encode()))
    except ValueError as error:
        channel.send(json.dumps(str(error)).encode())
        return
    channel.send(json.dumps({"schemas": handler.schemas, "server_tools": handler.server_tools}).encode())
    while (message := channel.receive()) is not None:
        for payload in pickle.loads(message):
            channel.beat(timeout)  # marks the request as started, so that it is not repeated if it ends this process
            channel.send(_dumped(handler.reply(pickle.loads(payload), lambda: channel.beat(timeout))))


def _dumped(reply: Reply) -> bytes:
    answer = json.dumps([reply.messages, reply.reward, reply.done, reply.error]).encode()
    if len(answer) > MAX_ANSWER:
        return _dumped(Reply(error=f"it returned {len(answer) / 2**20:.0f} MiB"))
    return answer


@dataclass
class _Session:
    """An environment in a conversation."""

    step: Callable[[Sequence[Message]], Reply]
    turns: int = 0


class RequestHandler:
    """Calls tools and steps environments.

    Args:
        specs: the tools and environments.
        server_tools: the `server_tools` of the process that this one replaces; empty for the first process.
        report: called with a description before a class is loaded.

    Raises:
        ValueError: a class cannot be loaded or instantiated.
    """

    def __init__(
        self,
        specs: ResponderSpecs,
        server_tools: Mapping[str, list[tuple[str, JsonObject]]],
        report: Callable[[str], None],
    ) -> None:
        self._environments, self._call_format = dict(specs.environments), specs.call_format
        self._classes: dict[str, Any] = {}
        for name, environment in self._environments.items():
            report(f"{environment.place}: loading {environment.title}")
            self._classes[name] = _load(environment)
        self._tools: JsonObject = {}
        self._sessions: dict[int, _Session] = {}
        self._batch = -1
        self.schemas: list[JsonObject] = []
        self.server_tools: dict[str, list[tuple[str, JsonObject]]] = {}
        """Tools of each MCP entry, as pairs of the server's name and the schema."""
        for spec in specs.tools:
            if isinstance(spec, McpSpec):
                report(f"{spec.place}: connecting to {', '.join(spec.servers)}")
                tools = _connect(spec, server_tools.get(spec.place))
                self.server_tools[spec.place] = [(server, schema) for server, schema, _ in tools]
                for _, schema, tool in tools:
                    self._register(schema, tool, spec.place)
            elif isinstance(spec, FunctionsSpec):
                report(f"{spec.place}: loading its functions")
                for schema, function in _functions(spec):
                    self._register(schema, _FunctionTool(function), spec.place)
            else:
                report(f"{spec.place}: loading {spec.class_name}")
                self._load_tool(spec)

    def _register(self, schema: JsonObject, tool: object, place: str) -> None:
        name = schema["function"]["name"]
        if name in self._tools:
            raise ValueError(f"{place}: another tool is already named {name}. Rename one of the two")
        self._tools[name] = tool
        self.schemas.append(json.loads(json.dumps(schema)))

    def _load_tool(self, spec: ToolSpec) -> None:
        tool_class = _load(spec)
        schema = spec.schema if spec.schema is not None else getattr(tool_class, "schema", None)
        if problem := schema_problem(schema):
            raise ValueError(f"{spec.place}: the schema of {spec.class_name}: {problem}. Give it as tool_schema")
        assert isinstance(schema, dict)
        is_verls = not hasattr(tool_class, "call")
        arguments = {"config": spec.config, "tool_schema": schema} if is_verls else spec.config
        self._register(schema, _instantiate(tool_class, arguments, spec), spec.place)

    def reply(self, request: CallRequest | StepRequest | LoadRequest, beat: Callable[[], None]) -> Reply:
        """Answer a request; any exception of user code becomes the error of the reply."""
        pid = os.getpid()
        try:
            if isinstance(request, LoadRequest):
                return self._check_loads(request)
            if isinstance(request, CallRequest):
                random.seed(repr((request.name, request.arguments)))
                return _call(self._tools[request.name], request)
            return self._step(request, beat)
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, including SystemExit
            # The policy reads error messages of tools, which must not depend on file paths.
            place = error_location(error) if isinstance(request, StepRequest) else ""
            return Reply(error=describe_error(error)[:_MESSAGE_HEAD] + place)
        finally:
            if os.getpid() != pid:
                os._exit(0)  # a tool forked the worker, and the copy returned from the call

    def _check_loads(self, request: LoadRequest) -> Reply:
        try:
            self._class_of(request.name)
        except ValueError as error:
            return Reply(error=str(error))
        return Reply()

    def _class_of(self, name: str) -> Any:
        if name not in self._classes:
            self._environments[name] = environment_named(name, self._call_format)
            self._classes[name] = _load(self._environments[name])
        return self._classes[name]

    def _step(self, request: StepRequest, beat: Callable[[], None]) -> Reply:
        """Step the environment of the conversation; if this process does not have it, replay the earlier turns."""
        if request.batch != self._batch:
            self._sessions.clear()
            self._batch = request.batch
        session = self._sessions.get(request.row)
        if session is None or session.turns != len(request.turns) - 1:
            session = self._sessions[request.row] = self._begin(request)
        reply = Reply()
        while session.turns < len(request.turns):
            session.turns += 1
            beat()
            messages = [*request.messages, *(m for turn in request.turns[: session.turns] for m in turn)]
            random.seed(repr(messages))  # the same random numbers in any process and after a restart
            reply = session.step(messages)
        return reply

    def _begin(self, request: StepRequest) -> _Session:
        environment_class, spec = self._class_of(request.name), self._environments[request.name]
        random.seed(repr(request.messages))
        if not hasattr(environment_class, "step"):
            return _verls_session(environment_class(spec.config), request, f"{spec.title}.generate_response")
        environment = environment_class(**spec.config)
        finished(environment.reset([dict(message) for message in request.messages], dict(request.row_info)))
        step = f"{spec.title}.step"
        return _Session(lambda messages: _stepped(finished(environment.step([dict(m) for m in messages])), step))


def _verls_session(interaction: Any, request: StepRequest, method: str) -> _Session:
    """Begin a session with an interaction that has verl's methods."""
    extra = request.row_info.get("extra_info") or {}
    kwargs = {key: value for key, value in (extra.get("interaction_kwargs") or {}).items() if key != "name"}
    instance = finished(interaction.start_interaction(None, **kwargs))

    def step(messages: Sequence[Message]) -> Reply:
        result = finished(interaction.generate_response(instance, [dict(m) for m in messages], **kwargs))
        if not isinstance(result, tuple) or len(result) != 4:
            raise TypeError(f"{method} returned {str(result)[:100]!r}, not (done, reply, reward, data)")
        done, text, reward, _ = result
        return _stepped((text, reward, done), method)

    return _Session(step)


def _stepped(result: Any, method: str) -> Reply:
    """Convert the result of a step to a reply; errors name the method."""
    if not isinstance(result, tuple) or len(result) != 3:
        raise TypeError(f"{method} returned {str(result)[:100]!r}, not (reply, reward, done)")
    content, reward, done = result
    if not isinstance(content, str | list | tuple | None):
        raise TypeError(f"{method} returned the reply {str(content)[:100]!r}, neither text nor a list of messages")
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else list(content or ())
    for message in messages:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise TypeError(f"{method} returned the message {str(message)[:100]!r}, not {{role, content}}")
    if not messages and not done:
        raise TypeError(f"{method} returned neither a reply nor done=True, so the policy could not continue")
    if done not in (None, False, True):
        raise TypeError(f"{method} returned done={str(done)[:100]!r}, neither True nor False")
    messages = [{"role": m["role"], "content": m["content"]} for m in messages]
    return Reply(messages, _reward(reward, method), bool(done))


def _reward(reward: Any, method: str) -> float:
    if reward is None:
        return 0.0
    if not hasattr(reward, "__float__"):  # accepts numbers of any library, but no strings
        raise TypeError(f"{method} returned the reward {str(reward)[:100]!r}, which is not a number")
    return float(reward)


def _call(tool: Any, request: CallRequest) -> Reply:
    if hasattr(tool, "call"):
        result = finished(tool.call(**request.arguments, **request.kwargs))
    else:
        instance = finished(tool.create(**_create_arguments(tool, request.kwargs.get("create_kwargs") or {})))
        instance = instance[0] if isinstance(instance, tuple) else instance
        try:
            result = finished(tool.execute(instance, request.arguments))
        finally:
            finished(tool.release(instance))
    text, reward = result[:2] if isinstance(result, tuple) else (result, None)
    messages = [{"role": "tool", "content": _as_text(text)}]
    return Reply(messages, _reward(reward, "call" if hasattr(tool, "call") else "execute"))


def _as_text(value: Any) -> str:
    """Convert a tool's result to text for the model: structures become JSON; images of verl's tools are only named."""
    if isinstance(getattr(value, "text", 0), str | None):  # verl's ToolResponse
        omitted = [kind for kind in ("image", "video") if getattr(value, kind, None)]
        return "\n".join(
            [*filter(None, [value.text]), *(f"[{kind}, which cannot be shown as text]" for kind in omitted)]
        )
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, bool | Mapping | list | tuple | set) or hasattr(value, "model_dump") or is_dataclass(value):
        with suppress(TypeError, ValueError, RecursionError):  # keys that are invalid in JSON, or a cycle
            return json.dumps(value, ensure_ascii=False, default=_plain)
    return str(value)


def _plain(value: Any) -> Any:
    """Convert a pydantic model, a dataclass, a set or an array to a JSON value; other objects become text."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    return sorted(value, key=str) if isinstance(value, set | frozenset) else str(value)


def _create_arguments(tool: Any, kwargs: JsonObject) -> JsonObject:
    parameters = inspect.signature(tool.create).parameters
    return {"create_kwargs": kwargs} if "create_kwargs" in parameters else kwargs


@dataclass(frozen=True)
class _FunctionTool:
    """A tool that is a function."""

    call: Callable[..., object]


def _functions(spec: FunctionsSpec) -> Iterator[tuple[JsonObject, Callable[..., object]]]:
    """Yield the schema of each function of a file, and the function.

    Raises:
        ValueError: the file cannot be imported, has no functions, or a function has no schema.
    """
    module = import_python_file(spec.file, FUNCTIONS_KEY)
    listed = getattr(module, "__all__", None)
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    names = [name for name in own if not name.startswith("_")] if listed is None else listed
    functions = {name: value for name in names if inspect.isfunction(value := getattr(module, name, None))}
    if not functions:
        raise ValueError(f"{spec.place}: defines no public function. Give it the functions that are tools")
    from transformers.utils.chat_template_utils import get_json_schema  # takes most of a second

    for name, function in functions.items():
        try:
            yield {**get_json_schema(function), "type": "function"}, function
        except Exception as error:
            what = f"{spec.place}: {name} has no schema ({describe_error(error)})"
            fix = "Describe it and its arguments in a docstring with `Args:`, give each argument a type, or list the"
            raise ValueError(f"{what}. {fix} functions that are tools in __all__") from error


def _load(spec: ToolSpec | EnvironmentSpec) -> Any:
    """Load the class of an entry.

    Raises:
        ValueError: the class is missing or cannot be loaded.
    """
    file, _, name = spec.class_name.rpartition(":")
    if file:
        try:
            loaded = definition(spec.class_name, "class_name")
        except ValueError as error:
            raise ValueError(f"{spec.place}: {error}") from error
    else:
        module, _, name = spec.class_name.rpartition(".")
        try:
            loaded = getattr(importlib.import_module(module), name)
        except Exception as error:
            if isinstance(spec, EnvironmentSpec) and spec.library_name and isinstance(error, ModuleNotFoundError):
                what = f"{spec.place}: {spec.library_name} needs the package {error.name}, which is not installed"
                raise ValueError(f"{what}. Run: {pip_install('verifiers')}") from error
            what = f"{spec.place}.{spec.class_key}={spec.class_name}: cannot be imported"
            raise ValueError(f"{what} ({describe_error(error)}){error_location(error)}") from error
    if not inspect.isclass(loaded):
        raise ValueError(f"{spec.place}: {spec.class_name} is a {type(loaded).__name__}, not a class")
    if problem := class_problem(spec, dir(loaded), _signature(loaded)):
        raise ValueError(f"{spec.place}: {spec.class_name} {problem}")
    if isinstance(spec, EnvironmentSpec) and hasattr(loaded, "prepare"):
        try:
            loaded.prepare(**spec.config)
        except Exception as error:
            if spec.library_name and raised_by_tether(error):
                place = "" if spec.place == spec.library_name else f"{spec.place}: "
                raise ValueError(f"{place}{error}") from error
            what = f"{spec.place}: {spec.title} cannot be prepared"
            raise ValueError(f"{what} ({describe_error(error)}){error_location(error)}") from error
    return loaded


def _signature(loaded_class: type) -> inspect.Signature | None:
    try:
        return inspect.signature(loaded_class)
    except (TypeError, ValueError):  # some classes written in C have none
        return None


def _connect(spec: McpSpec, server_tools: object) -> list[tuple[str, JsonObject, Any]]:
    """Call `tether.integrations.agents.mcp_servers.connect`, which requires an optional package.

    Raises:
        ValueError: the package is not installed, or `connect` failed.
    """
    try:
        servers = integration("agents", "mcp_servers")
    except ModuleNotFoundError as error:
        what = f"{spec.place}: tools of MCP servers need the package {error.name}, which is not installed"
        raise ValueError(f"{what}. Run: {pip_install('mcp')}") from error
    tools: list[tuple[str, JsonObject, Any]] = servers.connect(spec, server_tools)
    return tools


def _instantiate(tool_class: Any, arguments: JsonObject, spec: ToolSpec) -> Any:
    try:
        return tool_class(**arguments)
    except Exception as error:
        what = f"{spec.place}: {spec.class_name} cannot be created with config {spec.config}"
        raise ValueError(f"{what} ({describe_error(error)}){error_location(error)}") from error
