"""verl's shell scripts as configurations."""
