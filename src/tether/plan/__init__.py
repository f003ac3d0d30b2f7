"""Estimates what a run needs before it is started: memory per device, time per phase, disk space and price.

Only the configuration and the model's `config.json` are read: no torch, no weights, no network. The formulas of memory
are in `memory`, those of time in `timing`; `planning` applies them to a configuration.
"""
