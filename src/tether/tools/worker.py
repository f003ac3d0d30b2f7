"""The process that runs tools and environments. Loads no torch.

Requests come as pickles of the trainer's own data; answers are JSON, since what a user's code returned must not run
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from tether.runtime.channel import Channel
from tether.runtime.event_loop import event_loop, finished
from tether.runtime.install import pip_install
from tether.runtime.printable import print_harmlessly
from tether.runtime.user_files import definition, place_of, raised_by_tether, words_of
from tether.tools.pool import MAX_ANSWER, CallRequest, LoadRequest, Reply, StepRequest
from tether.tools.spec import (
    EnvironmentSpec,
    McpSpec,
    Talkers,
    ToolSpec,
    class_problem,
    environment_named,
    schema_problem,
)
from tether.types import JsonObject, Message

_MESSAGE_HEAD = 500  # characters


def serve(channel: Channel) -> None:
    """Answer requests until the trainer is gone: first the pickled arguments of `Desk` and the seconds of a call."""
    first = channel.receive()
    if first is None:
        return
    talkers, known, timeout = pickle.loads(first)
    asyncio.set_event_loop(event_loop())  # for classes that ask for it when they are made
    print_harmlessly()
    try:
        desk = Desk(talkers, known, loads=lambda what: channel.send(json.dumps([what]).encode()))
    except ValueError as error:
        channel.send(json.dumps(str(error)).encode())
        return
    channel.send(json.dumps({"schemas": desk.schemas, "of_servers": desk.of_servers}).encode())
    while (message := channel.receive()) is not None:
        for payload in pickle.loads(message):
            channel.beat(timeout)  # begun: a call that ends this process is not made again
            channel.send(_dumped(desk.reply(pickle.loads(payload), lambda: channel.beat(timeout))))


def _dumped(reply: Reply) -> bytes:
    answer = json.dumps([reply.messages, reply.reward, reply.done, reply.error]).encode()
    if len(answer) > MAX_ANSWER:
        return _dumped(Reply(error=f"it returned {len(answer) / 2**20:.0f} MiB"))
    return answer


@dataclass
class _Session:
    """An environment in the middle of a conversation."""

    step: Callable[[Sequence[Message]], Reply]
    turns: int = 0


class Desk:
    """Where tools are called and environments stepped.

    Args:
        talkers: which.
        known: `of_servers` of another process, which this one replaces.
        loads: called before a class is loaded, with its place and name.

    Raises:
        ValueError: a class that cannot be loaded or made.
    """

    def __init__(
        self, talkers: Talkers, known: Mapping[str, list[tuple[str, JsonObject]]], loads: Callable[[str], None]
    ) -> None:
        self._environments, self._call_format = dict(talkers.environments), talkers.call_format
        self._classes: dict[str, Any] = {}
        for name, environment in self._environments.items():
            loads(f"{environment.place}: loading {environment.title}")
            self._classes[name] = _load(environment)
        self._tools: JsonObject = {}
        self._sessions: dict[int, _Session] = {}
        self._batch = -1
        self.schemas: list[JsonObject] = []
        self.of_servers: dict[str, list[tuple[str, JsonObject]]] = {}
        """Of each entry for MCP servers: tools, each with the name of its server."""
        for spec in talkers.tools:
            if isinstance(spec, McpSpec):
                loads(f"{spec.place}: connecting to {', '.join(spec.servers)}")
                found = _connected(spec, known.get(spec.place))
                self.of_servers[spec.place] = [(server, schema) for server, schema, _ in found]
                for _, schema, tool in found:
                    self._keep(schema, tool, spec.place)
            else:
                loads(f"{spec.place}: loading {spec.class_name}")
                self._add(spec)

    def _keep(self, schema: JsonObject, tool: object, place: str) -> None:
        name = schema["function"]["name"]
        if name in self._tools:
            raise ValueError(f"{place}: a tool named {name} is there already. Rename one of the two")
        self._tools[name] = tool
        self.schemas.append(json.loads(json.dumps(schema)))

    def _add(self, spec: ToolSpec) -> None:
        tool_class = _load(spec)
        schema = spec.schema if spec.schema is not None else getattr(tool_class, "schema", None)
        if problem := schema_problem(schema):
            raise ValueError(f"{spec.place}: the schema of {spec.class_name}: {problem}. Give it as tool_schema")
        assert isinstance(schema, dict)
        is_verls = not hasattr(tool_class, "call")
        arguments = {"config": spec.config, "tool_schema": schema} if is_verls else spec.config
        self._keep(schema, _made(tool_class, arguments, spec), spec.place)

    def reply(self, request: CallRequest | StepRequest | LoadRequest, beat: Callable[[], None]) -> Reply:
        """Answer a request; whatever a user's code raises is an error of the reply."""
        own = os.getpid()
        try:
            if isinstance(request, LoadRequest):
                return self._load_more(request)
            if isinstance(request, CallRequest):
                random.seed(repr((request.name, request.arguments)))
                return _call(self._tools[request.name], request)
            return self._step(request, beat)
        except BaseException as error:  # noqa: BLE001 - user code may raise anything, SystemExit too
            # What a tool raises is read by the policy, which must not depend on where files lie.
            place = place_of(error) if isinstance(request, StepRequest) else ""
            return Reply(error=words_of(error)[:_MESSAGE_HEAD] + place)
        finally:
            if os.getpid() != own:
                os._exit(0)  # a copy of the worker, forked by a tool, that came back from the call

    def _load_more(self, request: LoadRequest) -> Reply:
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
        """Step the conversation's environment; one that is not here is brought to where it was."""
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
            random.seed(repr(messages))  # the same numbers whenever and wherever it is stepped
            reply = session.step(messages)
        return reply

    def _begin(self, request: StepRequest) -> _Session:
        environment_class, spec = self._class_of(request.name), self._environments[request.name]
        random.seed(repr(request.messages))
        if not hasattr(environment_class, "step"):
            return _verls_session(environment_class(spec.config), request, f"{spec.title}.generate_response")
        environment = environment_class(**spec.config)
        finished(environment.reset([dict(message) for message in request.messages], dict(request.about)))
        step = f"{spec.title}.step"
        return _Session(lambda messages: _stepped(finished(environment.step([dict(m) for m in messages])), step))


def _verls_session(interaction: Any, request: StepRequest, method: str) -> _Session:
    """An interaction with verl's methods, of which this one is stepped."""
    extra = request.about.get("extra_info") or {}
    kwargs = {key: value for key, value in (extra.get("interaction_kwargs") or {}).items() if key != "name"}
    instance = finished(interaction.start_interaction(None, **kwargs))

    def step(messages: Sequence[Message]) -> Reply:
        found = finished(interaction.generate_response(instance, [dict(m) for m in messages], **kwargs))
        if not isinstance(found, tuple) or len(found) != 4:
            raise TypeError(f"{method} returned {str(found)[:100]!r}, not (done, reply, reward, data)")
        done, text, reward, _ = found
        return _stepped((text, reward, done), method)

    return _Session(step)


def _stepped(result: Any, method: str) -> Reply:
    """The reply of a step; errors name the method, of a class that a file or module has."""
    if not isinstance(result, tuple) or len(result) != 3:
        raise TypeError(f"{method} returned {str(result)[:100]!r}, not (reply, reward, done)")
    said, reward, done = result
    if not isinstance(said, str | list | tuple | None):
        raise TypeError(f"{method} returned the reply {str(said)[:100]!r}, neither text nor a list of messages")
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else list(said or ())
    for message in messages:
        if not isinstance(message, Mapping) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise TypeError(f"{method} returned the message {str(message)[:100]!r}, not {{role, content}}")
    if not messages and not done:
        raise TypeError(f"{method} returned neither a reply nor done=True, so the policy could not go on")
    if done not in (None, False, True):
        raise TypeError(f"{method} returned done={str(done)[:100]!r}, neither True nor False")
    messages = [{"role": m["role"], "content": m["content"]} for m in messages]
    return Reply(messages, _reward(reward, method), bool(done))


def _reward(reward: Any, method: str) -> float:
    if reward is None:
        return 0.0
    if not hasattr(reward, "__float__"):  # a number of any library; a string is none
        raise TypeError(f"{method} returned the reward {str(reward)[:100]!r}, which is no number")
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
    """Return what a tool returned as the model reads it: structures as JSON; pictures of verl's tools are named."""
    if isinstance(getattr(value, "text", 0), str | None):  # verl's ToolResponse
        unseen = [kind for kind in ("image", "video") if getattr(value, kind, None)]
        return "\n".join(
            [*filter(None, [value.text]), *(f"[{kind}, which cannot be shown as text]" for kind in unseen)]
        )
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, bool | Mapping | list | tuple | set) or hasattr(value, "model_dump") or is_dataclass(value):
        with suppress(TypeError, ValueError, RecursionError):  # keys that JSON has not, or a structure within itself
            return json.dumps(value, ensure_ascii=False, default=_plain)
    return str(value)


def _plain(value: Any) -> Any:
    """What JSON has in the place of a pydantic model, a dataclass, a set or an array; text of anything else."""
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
    takes = inspect.signature(tool.create).parameters
    return {"create_kwargs": kwargs} if "create_kwargs" in takes else kwargs


def _load(spec: ToolSpec | EnvironmentSpec) -> Any:
    """The class of an entry.

    Raises:
        ValueError: there is none.
    """
    file, _, name = spec.class_name.rpartition(":")
    if file:
        try:
            found = definition(spec.class_name, "class_name")
        except ValueError as error:
            raise ValueError(f"{spec.place}: {error}") from error
    else:
        module, _, name = spec.class_name.rpartition(".")
        try:
            found = getattr(importlib.import_module(module), name)
        except Exception as error:
            if isinstance(spec, EnvironmentSpec) and spec.library_name and isinstance(error, ModuleNotFoundError):
                what = f"{spec.place}: {spec.library_name} needs the package {error.name}, which is not installed"
                raise ValueError(f"{what}. Run: {pip_install('verifiers')}") from error
            what = f"{spec.place}.class_name={spec.class_name}: cannot be imported"
            raise ValueError(f"{what} ({words_of(error)}){place_of(error)}") from error
    if not inspect.isclass(found):
        raise ValueError(f"{spec.place}: {spec.class_name} is a {type(found).__name__}, not a class")
    if problem := class_problem(spec, dir(found), _takes(found)):
        raise ValueError(f"{spec.place}: {spec.class_name} {problem}")
    if isinstance(spec, EnvironmentSpec) and hasattr(found, "prepare"):
        try:
            found.prepare(**spec.config)
        except Exception as error:
            if spec.library_name and raised_by_tether(error):
                place = "" if spec.place == spec.library_name else f"{spec.place}: "
                raise ValueError(f"{place}{error}") from error
            what = f"{spec.place}: {spec.title} cannot be prepared"
            raise ValueError(f"{what} ({words_of(error)}){place_of(error)}") from error
    return found


def _takes(found: type) -> inspect.Signature | None:
    try:
        return inspect.signature(found)
    except (TypeError, ValueError):  # of a class that is written in C
        return None


def _connected(spec: McpSpec, known: object) -> list[tuple[str, JsonObject, Any]]:
    """See `tether.tools.mcp_servers.connected`, which needs an extra.

    Raises:
        ValueError: it is not installed, or there.
    """
    try:
        servers = importlib.import_module("tether.tools.mcp_servers")
    except ModuleNotFoundError as error:
        what = f"{spec.place}: tools of MCP servers need the package {error.name}, which is not installed"
        raise ValueError(f"{what}. Run: {pip_install('mcp')}") from error
    found: list[tuple[str, JsonObject, Any]] = servers.connected(spec, known)
    return found


def _made(tool_class: Any, arguments: JsonObject, spec: ToolSpec) -> Any:
    try:
        return tool_class(**arguments)
    except Exception as error:
        what = f"{spec.place}: {spec.class_name} cannot be made with config {spec.config}"
        raise ValueError(f"{what} ({words_of(error)}){place_of(error)}") from error
