"""The policy behind an OpenAI-compatible server: a user's program plays an episode, and its calls are recorded.

`protocol` reads requests and writes answers, `chat` translates them to token ids and back, `episode` records the ids
that were sampled, `programs` runs the programs, and `endpoint` joins these. The HTTP server is
`tether.integrations.agents.endpoint_server`.
"""
