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

from tether.tools import CallRequest, Talkers, ToolPool, read_tools

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
    return ToolPool(Talkers(read_tools(path)), num_workers=1, timeout=timeout, startup_timeout=120.0)


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
        ({"sums": {"command": "no-such-program"}}, "mcpServers.sums does not answer as .*FileNotFoundError"),
        ({"sums": {"command": sys.executable, "args": ["-c", "pass"]}}, "mcpServers.sums does not answer"),
        ({"sums": {"url": "http://127.0.0.1:9/mcp"}}, "mcpServers.sums does not answer"),
    ],
)
def test_a_wrong_server_is_named(servers: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        pool_of(entry(tmp_path, servers))
