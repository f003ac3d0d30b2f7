"""Fused operations for the model code, chosen by device, dtype and processor."""
