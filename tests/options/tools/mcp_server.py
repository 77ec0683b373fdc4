"""An MCP server of the tests, written with the official package: tools that answer, fail, hang and end the server.

Run with `stdio`, or with a port.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

from mcp.server import MCPServer
from mcp.server.mcpserver import Image
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test")
STARTED = time.monotonic_ns()
COUNT = [0]


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def count() -> str:
    """Count its calls in this server."""
    COUNT[0] += 1
    return f"{COUNT[0]} of {os.getpid()}"


@server.tool()
def fails() -> str:
    """Raise."""
    raise ToolError("no such thing")


@server.tool()
async def sleeps() -> str:
    """Take too long, while others are served."""
    await asyncio.sleep(600)
    return "late"


@server.tool()
async def hangs() -> str:
    """Stop the whole server."""
    time.sleep(600)
    return "late"


@server.tool()
def dies() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def environment(name: str) -> str:
    """Read a variable."""
    return os.environ.get(name, "not there")


@server.tool()
def picture() -> Image:
    """Show one red pixel."""
    png = (
        "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8cfc0000003010100c9fe92ef"
        "0000000049454e44ae426082"
    )
    return Image(data=bytes.fromhex(png), format="png")


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
