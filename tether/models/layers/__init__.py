"""Modules that replace those of transformers: packed attention, RMS norm, rotary embedding, gated MLP."""
