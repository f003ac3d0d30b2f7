"""The processes that run reward functions, each call with a deadline."""
