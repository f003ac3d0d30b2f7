"""Runs tether.algorithms beside other libraries on the same random numbers, and explains what differs.

    python -m benchmarks.oracles                          # prints the tables
    python -m benchmarks.oracles --write docs/evidence/oracles.md  # and writes them
    python -m benchmarks.oracles --peers verl trl

The peers are taken from the package registry into an environment of their own (`environment`); tether depends on none
of them. Each peer has a file in `peers` with its checks: what tether calls, what the peer calls, and where the two are
known to differ, the reason. A difference without a reason, or a reason without a difference, fails the command.
"""
