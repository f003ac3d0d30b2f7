"""Observation and action spaces, as the rows and numbers that policies see."""
