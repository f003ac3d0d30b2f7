"""Builders of the parts of a text run, which `tether.text.build` calls in order, and of what single commands need."""
