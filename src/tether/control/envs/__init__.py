"""Vector environments: one interface (`tether.control.envs.protocol`) for every way of stepping simulators.

`make` creates them from options. `loop` steps environments one after the other and is the reference: `subprocesses` and
`gymnasium_vector` must give the same results. `conversion` converts their values, `layers` wrap them, and `state` saves
them. Code for a simulator library is in a module of its own, such as `minigrid`, which is imported only when a
configuration uses it; robot simulators are modules of `tether.integrations.robots`.
"""
