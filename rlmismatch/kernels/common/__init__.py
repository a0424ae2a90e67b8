"""What two or more operations use unchanged: choice of the implementation, one rounding, the pairwise tree."""
