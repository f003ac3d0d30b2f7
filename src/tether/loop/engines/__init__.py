"""What the engines of both kinds of policy share: their protocol, the optimizer, incidents, out-of-memory handling,
exchange between ranks.
"""
