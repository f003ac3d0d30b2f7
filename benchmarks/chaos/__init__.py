"""A soak that anyone can rerun: kills, hostile reward functions and bad files, counted as survived of tried."""
