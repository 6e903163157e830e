"""Rollouts in, policy versions out: admission, groups, advantages, objectives, trainer, checkpoints."""
