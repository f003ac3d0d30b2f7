"""Turns a checked configuration into the objects of a run: the only package that reads configuration."""
