"""What assembling a report asks of the process that does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlmismatch import assemble


def test_a_report_is_assembled_on_one_thread_and_gives_the_others_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def judged(folder: Path, **overrides: Any) -> Any:
        seen.append(torch.get_num_threads())
        raise RuntimeError("no run")

    monkeypatch.setattr(assemble, "_report", judged)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match="no run"):
            assemble.report(Path("run"))
        assert (seen, torch.get_num_threads()) == ([1], 2)
    finally:
        torch.set_num_threads(before)
