"""The learning rate of each step: linear warm-up, then constant, cosine or warm-up-stable-decay."""

from __future__ import annotations

import math

from mok.config import OptimConfig

__all__ = ["learning_rate"]


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of `step` (from 1) in a run of `steps`; the last step gets lr * min_lr_ratio unless the schedule is constant.

    cosine falls along half a cosine from the end of the warm-up to the end; wsd stays at the peak and falls linearly over the
    last `decay_fraction` of the steps.
    """
    warmup = min(config.warmup_steps, steps)
    if step <= warmup:
        return config.lr * step / warmup
    floor = config.min_lr_ratio
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "cosine":
        progress = (step - warmup) / (steps - warmup)
        return config.lr * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))
    decay = max(1, min(round(config.decay_fraction * steps), steps - warmup))
    progress = max(0, step - (steps - decay)) / decay
    return config.lr * (1.0 + (floor - 1.0) * progress)
