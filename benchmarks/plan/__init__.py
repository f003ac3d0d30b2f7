"""Are the plans of `tether plan` right? python -m benchmarks.plan"""
