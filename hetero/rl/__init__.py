"""Tasks, environments, rewards, trajectories and groups, advantages, algorithms."""
