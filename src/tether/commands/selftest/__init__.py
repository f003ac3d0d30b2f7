"""`tether selftest`: checks that what tether promises holds on this machine, with a report to attach to an issue.

`checks` lists the checks; each is a plain function of a `results.CheckContext`, in one of the modules beside it.
`command` runs them, prints a line for each and writes the report.
"""
