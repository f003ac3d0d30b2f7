"""`tether view`: what a run did, from its trend down to a token or a step of an episode.

`run` reads the folder of a run by offsets, `queries` answers questions about one run as plain data, `compare` about
several, `advice` finds what the run itself gives evidence for. The page (`server`), the exported file (`export`) and
`tether view --json` ask the same functions. Nothing here loads torch.
"""
