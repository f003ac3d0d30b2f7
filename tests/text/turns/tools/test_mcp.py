"""Tools of MCP servers: connected by each worker, called like others, and named where they are not there."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tether.text.turns.tools import CallRequest, ResponderSpecs, ToolPool, read_tools

if find_spec("mcp") is None:
    pytest.skip("needs mcp", allow_module_level=True)

SERVER = '''
import sys

from mcp.server import MCPServer

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(a + b)


@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("there is nothing to say")


@server.tool()
def hang() -> str:
    """Does not come back."""
    import time
    time.sleep(1000)
    return ""


@server.tool()
def end() -> str:
    """Ends the server."""
    import os
    os._exit(3)


server.run(*sys.argv[1:2], **{"port": int(port) for port in sys.argv[2:]})
'''


def entry(folder: Path, servers: object, **about: object) -> str:
    """A tool configuration in verl's layout; returns its path."""
    (folder / "servers.json").write_text(servers if isinstance(servers, str) else json.dumps({"mcpServers": servers}))
    named = {"mcp_servers_config_path": str(folder / "servers.json"), **about}
    tools = [{"class_name": "verl.tools.mcp_base_tool.MCPBaseTool", "config": {"type": "mcp"}, "mcp": named}]
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": tools}))
    return str(folder / "tools.yaml")


def sums(folder: Path) -> dict[str, object]:
    (folder / "server.py").write_text(SERVER)
    return {"sums": {"command": sys.executable, "args": [str(folder / "server.py")]}}


def pool_of(path: str, timeout: float = 60.0) -> ToolPool:
    return ToolPool(ResponderSpecs(read_tools(path)), num_workers=1, timeout=timeout, startup_timeout=120.0)


def call(pool: ToolPool, name: str, **arguments: object) -> object:
    return pool.take(pool.ask(CallRequest(name, arguments, {})))


def test_tools_of_a_server_are_called_and_one_that_ended_is_connected_again(tmp_path: Path) -> None:
    """The call in which it ended is an error, and is not made again."""
    with pool_of(entry(tmp_path, sums(tmp_path))) as pool:
        assert [schema["function"]["name"] for schema in pool.schemas] == ["add", "fail", "hang", "end"]
        about = pool.schemas[0]["function"]
        assert about["description"] == "The sum of two numbers."
        assert set(about["parameters"]["properties"]) == {"a", "b"}
        assert call(pool, "add", a=2, b=40).messages == [{"role": "tool", "content": "42"}]
        assert "Error executing tool fail" in call(pool, "fail").error
        assert "validation error" in call(pool, "add", a="two").error, "what the model wrote is not what the tool takes"
        assert call(pool, "add", a=1, b=1).messages[0]["content"] == "2", "it goes on"
        assert "Connection closed" in call(pool, "end").error
        assert call(pool, "add", a=2, b=40).messages == [{"role": "tool", "content": "42"}]
        (tmp_path / "server.py").unlink()
        assert "Connection closed" in call(pool, "end").error
        assert call(pool, "add", a=2, b=40).error
        (tmp_path / "server.py").write_text(SERVER)
        call(pool, "add", a=2, b=40)  # may find what the one before has tried
        assert call(pool, "add", a=2, b=40).messages == [{"role": "tool", "content": "42"}]


PAGES = """
import asyncio, os, sys
import mcp.types as t
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

tools = [t.Tool(name=name, input_schema={"type": "object"}) for name in ("where", "read", "last")]

async def listed(ctx, params):
    at = int((params.cursor if params else None) or 0)
    return t.ListToolsResult(tools=tools[at:at + 1], next_cursor=str(at + 1) if at < 2 else None)

async def called(ctx, params):
    resource = t.TextResourceContents(uri="file:///a", text="THE FILE")
    parts = [t.TextContent(text=os.getcwd()), t.EmbeddedResource(resource=resource)]
    return t.CallToolResult(content=parts)

async def main():
    server = Server("pages", on_list_tools=listed, on_call_tool=called)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())

asyncio.run(main())
"""


@pytest.mark.slow
def test_all_pages_of_tools_are_there_and_a_name_stands_for_one_tool(tmp_path: Path) -> None:
    (tmp_path / "pages.py").write_text(PAGES)
    (tmp_path / "elsewhere").mkdir()
    one = {"command": sys.executable, "args": [str(tmp_path / "pages.py")], "cwd": str(tmp_path / "elsewhere")}
    with pool_of(entry(tmp_path, {"one": one})) as pool:
        assert [schema["function"]["name"] for schema in pool.schemas] == ["where", "read", "last"]
        text_of = call(pool, "last").messages[0]["content"]
        assert text_of == f"{tmp_path / 'elsewhere'}\n[resource file:///a]\nTHE FILE"
    with pytest.raises(ValueError, match=r"mcpServers\.one and mcpServers\.two both have a tool named where"):
        pool_of(entry(tmp_path, {"one": one, "two": one}))


def test_all_that_a_server_says_reaches_the_model_or_is_named() -> None:
    from mcp import types

    from tether.integrations.agents.mcp_servers import as_text

    def text_of(*blocks: object, structured: object = None) -> str:
        return as_text(types.CallToolResult(content=list(blocks), structured_content=structured))

    def text(words: str) -> types.TextContent:
        return types.TextContent(text=words)

    blob = types.BlobResourceContents(uri="file:///b", blob="aGVsbG8=", mime_type="application/pdf")
    assert text_of(
        text("found"),
        types.ImageContent(data="aGVsbG8=", mime_type="image/png"),
        types.AudioContent(data="aGVsbG8=", mime_type="audio/wav"),
        types.ResourceLink(uri="file:///c", name="c", description="a page"),
        types.EmbeddedResource(resource=blob),
    ).splitlines() == [
        "found",
        "[image: image/png, which cannot be shown as text]",
        "[audio: audio/wav, which cannot be shown as text]",
        "[link to c: file:///c (a page)]",
        "[resource file:///b: application/pdf, which cannot be shown as text]",
    ]
    for blocks, structured, expected in (
        ([], {"degrees": 21}, '{"degrees": 21}'),
        ([text("warm")], {"degrees": None}, 'warm\n{"degrees": null}'),
        ([text('{"degrees": 21}')], {"degrees": 21}, '{"degrees": 21}'),
        ([text("42")], {"result": "42"}, "42"),
        ([text("42")], {"result": 42}, "42"),
        ([text("a"), text("b")], {"result": ["a", "b"]}, "a\nb"),
    ):
        assert text_of(*blocks, structured=structured) == expected


@contextmanager
def listening(folder: Path, port: int) -> Iterator[None]:
    """A server at an address, which is killed at the end."""
    process = subprocess.Popen([sys.executable, str(folder / "server.py"), "streamable-http", str(port)])
    while True:
        assert process.poll() is None
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            break
        time.sleep(0.1)
    yield
    process.kill()
    process.wait()


@pytest.mark.slow
def test_a_server_at_an_address_may_be_started_again(tmp_path: Path) -> None:
    sums(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with ExitStack() as server:
        server.enter_context(listening(tmp_path, port))
        with pool_of(entry(tmp_path, {"sums": {"url": f"http://127.0.0.1:{port}/mcp"}})) as pool:
            assert call(pool, "add", a=2, b=40).messages == [{"role": "tool", "content": "42"}]
            server.close()
            assert "MCPError: Connection closed" in call(pool, "add", a=2, b=40).error
            assert "ConnectError: All connection attempts failed" in call(pool, "add", a=2, b=40).error
            server.enter_context(listening(tmp_path, port))
            call(pool, "add", a=2, b=40)  # may find what the one before has tried
            assert call(pool, "add", a=2, b=40).messages == [{"role": "tool", "content": "42"}]


@pytest.mark.slow
def test_calls_of_a_server_that_is_gone_fail_and_the_run_goes_on(tmp_path: Path) -> None:
    """A call that hangs ends its worker; the one in its place does not find the server, and knows its tools."""
    with pool_of(entry(tmp_path, sums(tmp_path)), timeout=10.0) as pool:
        (tmp_path / "server.py").unlink()
        assert "within the deadline of 10 s" in call(pool, "hang").error
        assert "MCPError: Connection closed" in call(pool, "add", a=2, b=40).error
        (tmp_path / "server.py").write_text(SERVER)
        call(pool, "add", a=2, b=40)  # as above
        assert call(pool, "add", a=2, b=40).messages == [{"role": "tool", "content": "42"}]
        assert [schema["function"]["name"] for schema in pool.schemas] == ["add", "fail", "hang", "end"]


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"tool_selected_list": ["add", "search"]}, "there is no tool search; .*servers.json has add, fail, hang, end"),
        ({"tool_selected_list": "add"}, "tool_selected_list is 'add', not a list of names"),
        ({"tool_select_list": ["add"]}, "mcp.tool_select_list has no effect. Did you mean tool_selected_list"),
        ({"mcp_servers_config_path": None}, r"tools\[0\].mcp.mcp_servers_config_path is missing"),
        ({"mcp_servers_config_path": "nowhere.json"}, "mcp_servers_config_path=nowhere.json: no such file"),
    ],
)
def test_a_wrong_entry_is_named(about: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        pool_of(entry(tmp_path, sums(tmp_path), **about))


@pytest.mark.parametrize(
    ("servers", "message"),
    [
        ("{", 'servers.json: no JSON of the form {"mcpServers"'),
        ({}, 'servers.json: no JSON of the form {"mcpServers"'),
        ({"sums": {"args": ["server.py"]}}, "mcpServers.sums has neither `command`"),
        ({"sums": {"command": "x", "cdw": "/"}}, "mcpServers.sums.cdw has no effect. Did you mean cwd"),
        (
            {"sums": {"command": "x", "disabled": True}},
            "mcpServers.sums.disabled has no effect. Leave it out; there are",
        ),
        ({"sums": {"url": "http://x", "type": "sse"}}, "mcpServers.sums.type='sse': with `url` it is one of http"),
        ({"sums": {"command": "no-such-program"}}, "mcpServers.sums does not answer as .*FileNotFoundError"),
        ({"sums": {"command": sys.executable, "args": ["-c", "pass"]}}, "mcpServers.sums does not answer"),
        ({"sums": {"url": "http://127.0.0.1:9/mcp"}}, "mcpServers.sums does not answer"),
    ],
)
def test_a_wrong_server_is_named(servers: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        pool_of(entry(tmp_path, servers))
