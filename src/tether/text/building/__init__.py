"""Builders of the parts of a text run, and of what single commands need.

The list of parts is `tether.text.build`, which calls them in order.
"""
