"""Conversations: the policy's turns, the replies of tools and environments, and how both become one row of a batch.

`template` tokenizes the messages between two turns; `conversations` is the responder of a rollout engine.
"""
