"""The engine that runs forward and backward passes, its optimizer, and incidents."""
