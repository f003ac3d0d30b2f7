"""Tools of servers that speak the Model Context Protocol (MCP), by the package `mcp`; each worker connects."""

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

from tether.runtime.user_files import words_of
from tether.tools.spec import McpSpec
from tether.types import JsonObject

CONNECT_SECONDS = 60.0
"""In which a server must have told its tools."""


class McpServer:
    """One server, connected for as long as this process lives, by an event loop in a thread of its own.

    Args:
        where: see `McpSpec.servers`.
    """

    def __init__(self, where: Mapping[str, Any]) -> None:
        self._where, self._loop = where, asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._connect()

    def tools(self) -> dict[str, JsonObject]:
        """By name: as OpenAI's functions have it.

        Raises:
            Exception: whatever the connection raises, or `TimeoutError`.
        """
        return {
            tool.name: {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            for tool in self._listed()
        }

    def _connect(self) -> None:
        self._client: Future[Client] = Future()
        self._staying = asyncio.run_coroutine_threadsafe(self._stay(self._client), self._loop)

    async def _stay(self, opened: Future[Client]) -> None:
        """Hold the connection; one task opens it and would close it, as the package demands."""
        try:
            async with Client(_transport(self._where)) as client:
                opened.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:  # noqa: BLE001 - of the package, or of a server that is another's
            if not opened.done():
                opened.set_exception(error)

    def _listed(self) -> Sequence[Tool]:
        asked = _all_tools(self._client.result(CONNECT_SECONDS))
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result(CONNECT_SECONDS)

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """A tool's answer. A call in which the server is lost is not made again, but the next one finds it connected.

        Raises:
            RuntimeError: the tool failed, with its words.
        """
        try:
            asked = self._client.result(CONNECT_SECONDS).call_tool(name, arguments)
            result = asyncio.run_coroutine_threadsafe(asked, self._loop).result()
        except Exception:
            self._connect_if_lost()
            raise
        text = as_text(result)
        if result.is_error:
            raise RuntimeError(text)
        return text

    def _connect_if_lost(self) -> None:
        try:
            self._listed()
        except Exception:  # noqa: BLE001 - whatever it is, it does not answer
            self._staying.cancel()
            self._connect()


async def _all_tools(client: Client) -> list[Tool]:
    """The tools of all pages."""
    found: list[Tool] = []
    cursor, seen = None, set[str | None]()
    while cursor not in seen:  # a server that begins again has no more
        seen.add(cursor)
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        if (cursor := page.next_cursor) is None:
            break
    return found


def as_text(result: CallToolResult) -> str:
    """All that a tool said: what is no text is named, and structured content is JSON where no text says the same."""
    texts = [part.text for part in result.content if part.type == "text"]
    parts = [_part(part) for part in result.content]
    if result.structured_content is not None and not _says(texts, result.structured_content):
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(parts)


def _part(part: ContentBlock) -> str:
    if part.type == "text":
        return part.text
    if part.type == "resource":
        about = f"resource {part.resource.uri}"
        text = getattr(part.resource, "text", None)
        kind = part.resource.mime_type or "bytes"
        return f"[{about}]\n{text}" if text is not None else f"[{about}: {kind}, which cannot be shown as text]"
    if part.type == "resource_link":
        return f"[link to {part.title or part.name}: {part.uri}{f' ({part.description})' if part.description else ''}]"
    return f"[{part.type}: {part.mime_type}, which cannot be shown as text]"


def _says(texts: Sequence[str], structured: object) -> bool:
    """Whether texts say what is structured: as JSON, or as the result that servers wrap as ``{"result": ...}``."""
    wrapped = isinstance(structured, dict) and structured.keys() == {"result"}
    result = structured["result"] if isinstance(structured, dict) and wrapped else structured
    values = [_value(text) for text in texts]
    every: list[object] = [*texts, *values, list(texts), values]
    return structured in every or result in every or (len(texts) == 1 and str(result) == texts[0])


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


class McpTool:
    """One tool of a server, with the method that tools have."""

    def __init__(self, server: McpServer, name: str) -> None:
        self._server, self._name = server, name

    def call(self, /, **arguments: object) -> str:
        """See `McpServer.call`."""
        return self._server.call(self._name, arguments)


Found = list[tuple[str, JsonObject]]
"""Names of servers, each with the schema of one of its tools."""


def connected(spec: McpSpec, known: Found | None) -> list[tuple[str, JsonObject, McpTool]]:
    """The tools of an entry, each with the name of its server and its schema.

    Args:
        spec: the entry.
        known: what this found in another process. No server is waited for then: until one answers, its calls fail.

    Raises:
        ValueError: a server that cannot be reached, or has not the tools that are selected; two that have one name.
    """
    servers = {name: McpServer(where) for name, where in spec.servers.items()}
    found = _asked(spec, servers) if known is None else known
    return [(name, schema, McpTool(servers[name], schema["function"]["name"])) for name, schema in found]


def _asked(spec: McpSpec, servers: Mapping[str, McpServer]) -> Found:
    found: dict[str, tuple[str, JsonObject]] = {}
    for name, server in servers.items():
        try:
            tools = server.tools()
        except (Exception, NotInTime) as error:
            why = f"mcpServers.{name} does not answer as an MCP server ({words_of(error)})"
            raise ValueError(f"{spec.file}: {why}") from error
        for tool, function in tools.items():
            if tool in found and (not spec.selected or tool in spec.selected):
                raise ValueError(
                    f"{spec.file}: mcpServers.{found[tool][0]} and mcpServers.{name} both have a tool named {tool}. "
                    "Rename it in one of them, or leave it out by mcp.tool_selected_list"
                )
            found[tool] = (name, {"type": "function", "function": function})
    if missing := [tool for tool in spec.selected if tool not in found]:
        there = f"{spec.file} has {', '.join(found) or 'none'}"
        raise ValueError(f"{spec.place}.mcp.tool_selected_list: there is no tool {missing[0]}; {there}")
    return [found[tool] for tool in spec.selected or found]


def _transport(where: Mapping[str, Any]) -> Any:
    """Transport of `Client`."""
    if "command" in where:
        return StdioServerParameters(**{key: where[key] for key in ("command", "args", "env", "cwd") if key in where})
    headers = dict(where.get("headers") or {})
    if where.get("auth_token"):
        headers["Authorization"] = f"Bearer {where['auth_token']}"
    return streamable_http_client(where["url"], http_client=create_mcp_http_client(headers=headers))
