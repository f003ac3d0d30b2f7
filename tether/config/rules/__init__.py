"""Checks that compare several keys."""
