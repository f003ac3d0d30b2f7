"""Environments of `verifiers.v1`, played against the policy's server with ``endpoint.program=verifiers``.

Such an environment has a taskset, which creates and scores tasks, and a harness, a program that calls the model through
OpenAI's API. The harness calls tether's server, which records the tokens, as for any other program.

The options of ``verifiers:NAME?taskset.split=train&agent.max_turns=4`` are fields of the environment's configuration,
with paths as below ``[env]`` in the library's configuration files.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from itertools import islice
from typing import Any

import httpx
import openai
import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarness
from verifiers.v1.harnesses.utils.compaction import is_context_overflow
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from tether.integrations.agents.environment_rows import option_value
from tether.text.data.location import ENVIRONMENT, split_query
from tether.text.data.rows import RowSource
from tether.types import JsonObject, Message

__all__ = ["ChatHarness", "load", "play", "read_tasks"]  # the library looks up the harness in it

HARNESS = "tether_chat"
_CERTIFICATES = httpx.create_ssl_context()  # reading them takes longer than a short episode
sys.modules[HARNESS] = sys.modules[__name__]  # the library imports a harness by its id


class ChatHarness(NullHarness):
    """Lets the model reply and call tools until it calls none, in this process.

    The library's harness `null` does the same in a new process per user turn, with packages that uv installs.
    """

    SUPPORTS_TOOL_INTERCEPTION = False

    async def setup(self, runtime: vf.Runtime) -> None:
        pass

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        messages: list[Any] = [*_messages(data)]
        urls = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            connection = openai.DefaultAsyncHttpxClient(verify=_CERTIFICATES)
            client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None, http_client=connection)
            await stack.enter_async_context(client)
            tools, owners, servers = await connect_mcp({"mcpServers": urls}, stack)
            while True:
                try:
                    answer = await client.chat.completions.create(
                        model=ctx.model, messages=messages, tools=tools or openai.omit
                    )
                except openai.APIStatusError as error:  # also when the task stops the episode
                    return vf.ProgramResult(0 if is_context_overflow(error) else 1, "", str(error))
                message = answer.choices[0].message.model_dump(exclude_none=True)
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(0, "", "")
                for call in message["tool_calls"]:
                    name, arguments = call["function"]["name"], call["function"]["arguments"] or "{}"
                    content = _call_problem(name, arguments, owners)
                    if not content:
                        content = await call_mcp(servers, owners, name, json.loads(arguments))
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


def _call_problem(name: str, arguments: str, tools: Mapping[str, object]) -> str:
    """Return an error message for the model about a tool call; empty if the call is valid."""
    if name not in tools:
        return f"error: unknown tool {name!r}"
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except ValueError as error:
        return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
    return "" if is_object else "error: the tool arguments have to be a JSON object; resend the call with one"


@functools.cache
def load(spec: str) -> vf.Env:
    """Load the environment of ``NAME?field=value&...``.

    If neither the environment nor an option names a harness, it is `ChatHarness`, so that no role gets a shell by
    default.

    Raises:
        ValueError: the environment is not installed, rejects an option, or has several roles for the policy.
    """
    name, options = split_query(spec)
    settings: JsonObject = {"taskset": {"id": name}}
    try:
        for path, text in options.items():
            *sections, field = path.split(".")
            section = functools.reduce(lambda outer, key: outer.setdefault(key, {}), sections, settings)
            section[field] = text if text == "null" else option_value(text)  # `null` is the id of a harness
        bundled = vf.default_harness_id(name)
        harness = HARNESS if bundled == "bash" else bundled
        for section in settings.values():
            if isinstance(section, dict) and isinstance(section.get("harness"), dict):
                section["harness"].setdefault("id", harness)  # the library's default is `bash`
        config = vf.resolve_env_config(settings)
        roles = {role: _role(agent, settings.get(role, {}), harness) for role, agent in _roles(config).items()}
        environment = vf.load_environment(config.model_copy(update=roles))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, item['loc']))}={item['input']!r}: {item['msg']}" for item in error.errors()]
        fix = "Options are paths in the environment's configuration, such as taskset.split"
        raise ValueError(f"{ENVIRONMENT}{spec}: {'; '.join(problems)}. {fix}") from error
    except Exception as error:
        what = f"{ENVIRONMENT}{spec}: the environment cannot be loaded: {error}"
        if isinstance(error, AttributeError | ImportError):
            what += ". One of verifiers before 0.4 needs pip install 'verifiers>=0.2,<0.3'"
        raise ValueError(what) from error
    _policy_role(environment)
    return environment


def _roles(config: vf.EnvConfig) -> dict[str, vf.AgentConfig]:
    return {name: value for name, value in config if isinstance(value, vf.AgentConfig)}


def _role(agent: vf.AgentConfig, explicit: JsonObject, harness: str) -> vf.AgentConfig:
    """Return a role with tether's defaults: the harness, run on this machine."""
    changes: JsonObject = {"retries": vf.RetryConfig()}  # training would treat a second attempt as a branch
    if "runtime" not in explicit and isinstance(agent.runtime, vf.PrimeConfig):
        changes["runtime"] = vf.SubprocessConfig()
    if agent.harness is None:
        changes["harness"] = vf.harness_config_type(harness)(id=harness)
    return agent.model_copy(update=changes)


def _policy_role(environment: vf.Env) -> str:
    """Return the policy's role: the only one without a configured model.

    Raises:
        ValueError: there are none or several such roles.
    """
    roles = [name for name, agent in _roles(environment.config).items() if agent.model is None]
    if len(roles) != 1:
        raise ValueError(
            f"{ENVIRONMENT}{environment.config.taskset.id}: the policy plays {len(roles)} roles ({', '.join(roles)}), "
            "and tether trains one. Give the others a model: "
            "ROLE.model=NAME&ROLE.client.type=eval&ROLE.client.base_url=URL&ROLE.client.api_key_var=VARIABLE"
        )
    return roles[0]


def read_tasks(spec: str, environment: str, size: int | None) -> RowSource:
    """Read the tasks of an environment, one per row.

    Args:
        spec: the source, for messages.
        environment: name and options of the environment.
        size: number of tasks, from the first; None: all.

    Raises:
        ValueError: the environment or its tasks cannot be loaded, or tasks are unlimited and no size is given.
    """
    taskset = load(environment).taskset
    if taskset.INFINITE and size is None:
        raise ValueError(f"{spec}: the tasks have no end. Say how many to use: size=1000")
    try:
        tasks = list(islice(taskset, size))
        records = [_record(task.data, environment, index) for index, task in enumerate(tasks)]
    except Exception as error:
        raise ValueError(f"{spec}: the tasks cannot be loaded: {error}") from error
    return RowSource(spec, records, ())


def _record(data: vf.TaskData, environment: str, index: int) -> JsonObject:
    task = data.model_dump(mode="json")
    return {
        "data_source": f"verifiers/{environment.partition('?')[0]}",
        "prompt": _messages(data),
        "reward_model": {"style": "verifier", "ground_truth": task.get("answer")},
        "extra_info": {"index": index, "verifiers": {"environment": environment, "task": task}},
    }


def _messages(data: vf.TaskData) -> list[Message]:
    """Return the initial messages of a task; a task without a prompt, which a user begins, has an empty one."""
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str) or data.prompt is None:
        return [*system, {"role": "user", "content": data.prompt or ""}]
    return [*system, *map(message_to_wire, data.prompt)]


async def play(row: JsonObject) -> float:
    """Play an episode of a row, and return the reward of its trace.

    Raises:
        RuntimeError: the harness, a tool or the scoring failed.
    """
    about = row["extra_info"]["verifiers"]
    environment = load(about["environment"])
    task_type = type(environment.taskset).task_type()
    task = task_type(task_type.data_type().model_validate(about["task"]), environment.config.taskset.task)
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    context = vf.ModelContext(model=os.environ["OPENAI_MODEL"], client=client)
    async with environment.serving():  # per episode, because the library caches a client with its API key
        episode = await environment.run_episode(task, context)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode failed")
    role = _policy_role(environment)
    traces = [trace for trace in episode.traces if trace.agent.name == role]
    if len(traces) != 1:
        raise RuntimeError(f"the policy played {role} {len(traces)} times in an episode, and tether scores one")
    return float(traces[0].reward)
