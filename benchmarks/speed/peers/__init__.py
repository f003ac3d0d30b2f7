"""Peers in processes of their own. A worker here imports nothing of tether: it runs in the peer's environment.

Parent and worker speak lines of JSON: the parent writes a request to the worker's input, the worker one answer each.
Between two requests a worker waits and takes no processor time, so that sides can take turns.
"""
