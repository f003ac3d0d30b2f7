"""Measurements: learning, speed, and comparisons with peers. Nothing here is a test."""

import tether  # noqa: F401  # before torch, whose threads wait as it sets
