"""Measuring links: what each ordered pair of GPUs moves and how fast, and all-to-all at the sizes of an MoE layer.

`plan.py` decides how much, `runner.py` in which order, `backend.py` how on CUDA (with the kernels of `kernels.py`), `watch.py`
runs all of it in a child process under a time limit, `collective.py` does the all-to-all among the ranks of a launch.
"""
