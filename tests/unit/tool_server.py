"""A server of the Model Context Protocol, over its standard input and output."""

from mcp.server import MCPServer

server = MCPServer("tools")


@server.tool()
def add(a: int, b: int) -> str:
    """The sum of two numbers."""
    return str(a + b)


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ValueError("out of order")


if __name__ == "__main__":
    server.run("stdio")
