"""Vector environments: one interface (`tether.control.envs.protocol`) for every way of stepping simulators.

`make` builds one from its options. `loop` steps several environments and is the reference: `subprocesses` and
`gymnasium_vector` must give the same results. `conversion` reads and writes their values, `layers` lie around them, and
`state` saves them. A simulator library has a module of its own, such as `minigrid`, which is imported only when a
configuration names it; simulators of robots are modules of `tether.integrations.robots`.
"""
