"""The decoder: attention, norms, dense and MoE blocks, and the loss on top. Start at `mok/model/transformer.py`."""
