"""An OpenAI-compatible server for the policy: a user's program plays an episode, and its calls are recorded.

`protocol` parses requests and formats responses, `chat` translates them to token ids and back, `episode` records the
sampled ids, `programs` runs the programs, and `endpoint` combines these. The HTTP server is
`tether.integrations.agents.endpoint_server`.
"""
