"""The errors that hetero raises.

Every error also inherits the built-in it refines, so `except ValueError` keeps working. A message says what
was got, what was expected and how to fix it.
"""

from __future__ import annotations


class HeteroError(Exception):
    """Base of every error that hetero raises on purpose."""


class ShapeError(HeteroError, ValueError):
    """A tensor has the wrong shape, dtype or layout."""


class ArgumentError(HeteroError, ValueError):
    """An argument of a public call has a value that it cannot take."""


class ModelError(HeteroError, ValueError):
    """A model, checkpoint or adapter cannot be used as asked."""


class RecipeError(HeteroError, ValueError):
    """A recipe has an unknown key, a bad value or contradicts itself."""


class DataError(HeteroError, ValueError):
    """A data set is missing, empty or has rows that cannot be used."""


class RewardError(HeteroError, RuntimeError):
    """Reward functions failed on too many samples to go on."""


class CapacityError(HeteroError, MemoryError):
    """Something does not fit: a prompt in the context, a cache in memory."""


class CheckpointError(HeteroError, RuntimeError):
    """A checkpoint or run directory is missing, torn or belongs to another recipe."""


class TrainingError(HeteroError, RuntimeError):
    """Training cannot go on: calls out of order, or gradients that stay non-finite."""


class WrongResultError(HeteroError, ArithmeticError):
    """A kernel computed something other than its reference."""


class UnavailableError(HeteroError, RuntimeError):
    """A needed resource (package, file, device, instruction set) is not there."""
