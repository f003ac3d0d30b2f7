"""tether: post-train policies with PPO and its relatives.

Importing this package loads nothing heavy; take what you need from its subpackages.
"""

__version__ = "0.1.0"
