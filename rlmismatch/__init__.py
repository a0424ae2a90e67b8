"""Which of two engines is wrong, why, by how much, and what to change."""

__version__ = "0.1.0"
