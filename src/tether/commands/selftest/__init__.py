"""`tether selftest`: checks on this machine that tether works as promised, with a report to attach to an issue.

`checks` lists the checks; each is a plain function of a `results.CheckContext` in one of this package's modules.
`command` runs them, prints a line for each and writes the report.
"""
