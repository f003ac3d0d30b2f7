"""The schema: one class a section, one field a key, the doc of a key once, under its field."""
