"""``verkv bench``: what VerKV costs, side by side with what it replaces, in one run.

Each benchmark is one small module with a function that takes settings and returns comparisons; `timing` interleaves the
cases of a comparison and takes ratios, `report` prints and writes them, `run` ties them together.
"""
