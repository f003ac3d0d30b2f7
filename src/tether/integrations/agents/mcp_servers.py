"""Tools of servers of the Model Context Protocol (MCP), through the package `mcp`; each worker connects to them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from typing import Any

from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client
from mcp.types import CallToolResult, ContentBlock, Tool

from tether.runtime.user_files import describe_error
from tether.text.turns.tools.spec import McpSpec
from tether.types import JsonObject

CONNECT_SECONDS = 60.0
"""Timeout for connecting to a server and listing its tools, in seconds."""


class McpServer:
    """A server, connected until this process ends, by an event loop in a separate thread.

    Args:
        settings: settings of the connection, a value of `McpSpec.servers`.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings, self._loop = settings, asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._connect()

    def tools(self) -> dict[str, JsonObject]:
        """Return name -> tool, in the format of OpenAI's function calling.

        Raises:
            Exception: any error of the connection, or `TimeoutError`.
        """
        return {
            tool.name: {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            for tool in self._list_tools()
        }

    def _connect(self) -> None:
        self._client: Future[Client] = Future()
        self._connection = asyncio.run_coroutine_threadsafe(self._stay_connected(self._client), self._loop)

    async def _stay_connected(self, opened: Future[Client]) -> None:
        # The package requires that the same task opens and closes a connection.
        try:
            async with Client(_transport(self._settings)) as client:
                opened.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:  # noqa: BLE001 - the package or a foreign server may raise anything
            if not opened.done():
                opened.set_exception(error)

    def _list_tools(self) -> Sequence[Tool]:
        tools = _all_tools(self._client.result(CONNECT_SECONDS))
        return asyncio.run_coroutine_threadsafe(tools, self._loop).result(CONNECT_SECONDS)

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its answer.

        A call that loses the connection is not repeated, but the next call connects again.

        Raises:
            RuntimeError: the tool failed; the message is its answer.
        """
        try:
            call = self._client.result(CONNECT_SECONDS).call_tool(name, arguments)
            result = asyncio.run_coroutine_threadsafe(call, self._loop).result()
        except Exception:
            self._connect_if_lost()
            raise
        text = as_text(result)
        if result.is_error:
            raise RuntimeError(text)
        return text

    def _connect_if_lost(self) -> None:
        try:
            self._list_tools()
        except Exception:  # noqa: BLE001 - any error means that the server does not answer
            self._connection.cancel()
            self._connect()


async def _all_tools(client: Client) -> list[Tool]:
    """List the tools of all pages."""
    tools: list[Tool] = []
    cursor, seen = None, set[str | None]()
    while cursor not in seen:  # some servers return to the first page after the last one
        seen.add(cursor)
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        if (cursor := page.next_cursor) is None:
            break
    return tools


def as_text(result: CallToolResult) -> str:
    """Return a tool's result as text.

    Content other than text is described in brackets, and structured content is added as JSON unless a text repeats it.
    """
    texts = [block.text for block in result.content if block.type == "text"]
    blocks = [_block_text(block) for block in result.content]
    if result.structured_content is not None and not _repeats(texts, result.structured_content):
        blocks.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(blocks)


def _block_text(block: ContentBlock) -> str:
    if block.type == "text":
        return block.text
    if block.type == "resource":
        resource = f"resource {block.resource.uri}"
        text = getattr(block.resource, "text", None)
        kind = block.resource.mime_type or "bytes"
        return f"[{resource}]\n{text}" if text is not None else f"[{resource}: {kind}, which cannot be shown as text]"
    if block.type == "resource_link":
        description = f" ({block.description})" if block.description else ""
        return f"[link to {block.title or block.name}: {block.uri}{description}]"
    return f"[{block.type}: {block.mime_type}, which cannot be shown as text]"


def _repeats(texts: Sequence[str], structured: object) -> bool:
    """Return whether texts repeat the structured content: as JSON, or the value that servers wrap in ``result``."""
    wrapped = isinstance(structured, dict) and structured.keys() == {"result"}
    result = structured["result"] if isinstance(structured, dict) and wrapped else structured
    values = [_value(text) for text in texts]
    candidates: list[object] = [*texts, *values, list(texts), values]
    return structured in candidates or result in candidates or (len(texts) == 1 and str(result) == texts[0])


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


class McpTool:
    """A tool of a server, with the interface of tether's tools."""

    def __init__(self, server: McpServer, name: str) -> None:
        self._server, self._name = server, name

    def call(self, /, **arguments: object) -> str:
        """Call the tool on its server, as `McpServer.call` does."""
        return self._server.call(self._name, arguments)


ServerTools = list[tuple[str, JsonObject]]
"""(name of the server, schema) for each tool."""


def connect(spec: McpSpec, server_tools: ServerTools | None) -> list[tuple[str, JsonObject, McpTool]]:
    """Connect to the servers of an entry; return the name of the server, the schema and the object of each tool.

    Args:
        spec: the entry.
        server_tools: tools that another process has listed. If given, this does not wait for the servers: calls of a
            tool fail until its server responds.

    Raises:
        ValueError: a server cannot be reached or lacks a selected tool, or two tools have the same name.
    """
    servers = {name: McpServer(settings) for name, settings in spec.servers.items()}
    tools = _select_tools(spec, servers) if server_tools is None else server_tools
    return [(name, schema, McpTool(servers[name], schema["function"]["name"])) for name, schema in tools]


def _select_tools(spec: McpSpec, servers: Mapping[str, McpServer]) -> ServerTools:
    available: dict[str, tuple[str, JsonObject]] = {}
    for name, server in servers.items():
        try:
            tools = server.tools()
        except (Exception, NotInTime) as error:
            why = f"mcpServers.{name} does not answer as an MCP server ({describe_error(error)})"
            raise ValueError(f"{spec.file}: {why}") from error
        for tool, function in tools.items():
            if tool in available and (not spec.selected or tool in spec.selected):
                raise ValueError(
                    f"{spec.file}: mcpServers.{available[tool][0]} and mcpServers.{name} both have a tool named "
                    f"{tool}. Rename it in one of them, or exclude it with mcp.tool_selected_list"
                )
            available[tool] = (name, {"type": "function", "function": function})
    if missing := [tool for tool in spec.selected if tool not in available]:
        names = f"{spec.file} has {', '.join(available) or 'none'}"
        raise ValueError(f"{spec.place}.mcp.tool_selected_list: there is no tool {missing[0]}; {names}")
    return [available[tool] for tool in spec.selected or available]


def _transport(settings: Mapping[str, Any]) -> Any:
    if "command" in settings:
        keys = [key for key in ("command", "args", "env", "cwd") if key in settings]
        return StdioServerParameters(**{key: settings[key] for key in keys})
    headers = dict(settings.get("headers") or {})
    if settings.get("auth_token"):
        headers["Authorization"] = f"Bearer {settings['auth_token']}"
    return streamable_http_client(settings["url"], http_client=create_mcp_http_client(headers=headers))
