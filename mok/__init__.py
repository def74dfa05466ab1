"""Train and verify Mixture-of-Experts language models."""
