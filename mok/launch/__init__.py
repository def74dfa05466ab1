"""Host side of the kernels: which configuration, what memory, the launches."""
