"""What a run needs before it is started: memory of each device, time of each phase, disk and price.

Only the configuration and the model's `config.json` are read: no torch, no weights, no network. The formulas of memory
are in `memory`, those of time in `timing`; `planning` applies them to a configuration.
"""
