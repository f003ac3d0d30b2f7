"""`tether view`: shows what a run did, from trends down to single tokens or steps of an episode.

`run` reads the folder of a run by offsets; `queries` answers questions about one run as plain data, and `compare` about
several; `advice` derives findings from the run's own records. The page (`server`), the exported file (`export`) and
`tether view --json` use the same functions. This package does not import torch.
"""
