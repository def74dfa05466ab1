"""How rows of a MoE layer travel between the rank of a token and the rank of its expert."""
