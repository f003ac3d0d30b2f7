"""The native engine: sampling in the trainer's process."""
