"""Other people's implementations behind the interface of a contestant, one file each; none is imported unless it is named."""
