"""From a configuration to a run: the only package that reads the configuration.

Everything cheap is checked before anything expensive is loaded: paths, data and rewards (`inputs`), then the weights
(`learners`), then all of it is put together (`run`).
"""
