"""``python -m rlmismatch`` and ``torchrun -m rlmismatch``."""

from rlmismatch.cli import main

if __name__ == "__main__":
    main()
