"""Train and verify Mixture-of-Experts language models."""

__version__ = "0.1.0"
