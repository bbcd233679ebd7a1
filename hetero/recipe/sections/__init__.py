"""The sections of a recipe. Every key has its default and its meaning here, and nowhere else."""
