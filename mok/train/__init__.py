"""Training: what a step is (`step`), what surrounds it (`loop`), and what they use. Start at `mok/train/loop.py`."""
