"""Measurements: learning, speed, and comparisons with peers. Nothing here is a test."""
