"""Other frameworks' configuration files, rewritten in the keys of tether."""
