"""Tools of MCP servers, and environments of the verifiers package."""
