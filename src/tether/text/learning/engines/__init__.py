"""Engines that own a language model and its optimizer: in one process, on one rank, or sharded by FSDP2."""
