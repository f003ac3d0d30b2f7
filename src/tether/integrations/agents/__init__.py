"""Agents: tools of MCP servers, environments of the verifiers package, and the server for external programs."""
